"""Llama 3.2 and 4, and others: the whole message is a Python list of calls.

[weather(city="Paris", days=3), time(zone='CET')]

`Literals` reads Python calls with literal arguments, and writes the arguments as JSON. Runs nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from diptych.router.text.parsing.calls import NoCall, ToolFormat, begin_call, collected, read_from_first
from diptych.router.text.parsing.reader import Nesting, Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

MARK, MARK_END = "<|python_start|>", "<|python_end|>"
_QUOTES: Final = "\"'"
MAX_DEPTH: Final = 32

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<sign>[\[\](){},:=])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_from_first(reader, writer, "[", _calls, {MARK: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    """The list is read when it is complete: until then it might be anything."""
    text = yield from collected(reader, _list)
    try:
        calls = Literals(text).calls()
    except NoLiteral:
        raise NoCall from None
    if not all(name in writer.functions for name, _ in calls):
        raise NoCall
    for name, arguments in calls:
        begin_call(reader, writer, name)
        writer.arguments(arguments)
    yield from reader.skip_blanks()
    yield from reader.consume(MARK_END)


def _list(reader: Reader, sink: Sink) -> Reading[bool]:
    return reader.while_open(Nesting(quotes=_QUOTES).find_end, sink)


PYTHONIC = ToolFormat(read, in_template=(MARK,), tokens=(MARK, MARK_END))


class NoLiteral(ValueError):
    """The text is something else."""


class Literals:
    """A text, read from the front."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._next()

    def calls(self) -> list[tuple[str, str]]:
        """Read `[name(key=value, ...), ...]` and nothing more: names and arguments. Raises `NoLiteral`."""
        self._expect("[")
        calls = [self._call()]
        while self._consume(","):
            calls.append(self._call())
        self._expect("]")
        if self._kind or self._at < len(self._text):
            raise NoLiteral
        return calls

    def _call(self) -> tuple[str, str]:
        name, arguments = self._name(), {}
        self._expect("(")
        while not self._consume(")"):
            key = self._name()
            self._expect("=")
            arguments[key] = self._value(0)
            if self._token != ")":
                self._expect(",")
        try:
            return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise NoLiteral from None

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NoLiteral
        kind, token = self._kind, self._token
        self._next()
        match kind, token:
            case "string", _:
                return _unquoted(token)
            case "number", _:
                return _number(token)
            case "name", _ if token in _WORDS:
                return _WORDS[token]
            case "sign", "[":
                return self._items("]", depth)
            case "sign", "(":
                return self._items(")", depth)
            case "sign", "{":
                return self._members(depth)
        raise NoLiteral

    def _items(self, closing: str, depth: int) -> list[Any]:
        items = []
        while not self._consume(closing):
            items.append(self._value(depth + 1))
            if self._token != closing:
                self._expect(",")
        return items

    def _members(self, depth: int) -> dict[str, Any]:
        members = {}
        while not self._consume("}"):
            key = self._value(depth + 1)
            self._expect(":")
            members[str(key)] = self._value(depth + 1)
            if self._token != "}":
                self._expect(",")
        return members

    def _name(self) -> str:
        if self._kind != "name":
            raise NoLiteral
        name = self._token
        self._next()
        return name

    def _consume(self, sign: str) -> bool:
        found = (self._kind, self._token) == ("sign", sign)
        if found:
            self._next()
        return found

    def _expect(self, sign: str) -> None:
        if not self._consume(sign):
            raise NoLiteral

    def _next(self) -> None:
        """Move to the next token; none at the end, or where there is nothing that a literal may hold."""
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            self._kind, self._token = "", ""
            return
        self._at = match.end()
        self._kind = str(match.lastgroup)
        self._token = match[self._kind]


def _number(token: str) -> float | int:
    try:
        return int(token)
    except ValueError:
        return float(token)


def _unquoted(token: str) -> str:
    return _ESCAPE.sub(_unescaped, token[1:-1])


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, escape if escape in "\\'\"" else match[0])
