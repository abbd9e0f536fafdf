"""Reads Python calls with literal arguments, and writes the arguments as JSON. Runs nothing."""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_DEPTH: Final = 32

# A quote ends its text where something follows that may come after one: the template of LFM2 escapes none within.
_WITHIN: Final = r"(?!\s*(?:[,)\]}:]|\Z))"
_STRING: Final = "|".join(rf"{quote}(?:[^{quote}\\]|\\.|{quote}{_WITHIN})*+{quote}" for quote in ('"', "'"))
_TOKEN: Final = re.compile(
    rf"""\s*(?:
        (?P<string>{_STRING})
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<sign>[\[\](){{}},:=])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


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
        calls = [self._item()]
        while self._consume(","):
            calls.append(self._item())
        self._expect("]")
        self._expect_end()
        return calls

    def call(self) -> tuple[str, str]:
        """Read `name(key=value, ...)` and nothing more. Raises `NoLiteral`."""
        call = self._call()
        self._expect_end()
        return call

    def _item(self) -> tuple[str, str]:
        return self._call_of_members() if self._token == "{" else self._call()

    def _call_of_members(self) -> tuple[str, str]:
        """Read `{"name": ..., "arguments": {...}}`."""
        call = self._value(0)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NoLiteral
        return name, _json(arguments)

    def _call(self) -> tuple[str, str]:
        name, arguments = self._name(), {}
        self._expect("(")
        while not self._consume(")"):
            key = self._name()
            self._expect("=")
            arguments[key] = self._value(0)
            if self._token != ")":
                self._expect(",")
        return name, _json(arguments)

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

    def _expect_end(self) -> None:
        if self._kind or self._at < len(self._text):
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


def _json(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise NoLiteral from None


def _number(token: str) -> float | int:
    try:
        return int(token)
    except ValueError:
        return float(token)


def _unquoted(token: str) -> str:
    """Two escapes may be the halves of one character; half of one is none, and could not be sent."""
    text = _ESCAPE.sub(_unescaped, token[1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, escape if escape in "\\'\"" else match[0])
