"""Gemma 4: special tokens around each call and each text; keys have no quotes.

<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,places:[<|"|>a<|"|>]}<tool_call|>
"""

from __future__ import annotations

import re
from typing import Final

from diptych.router.text.parsing.calls import NoCall, ToolFormat, begin_call, collected, read_marked
from diptych.router.text.parsing.formats.tagged import json_of, quoted
from diptych.router.text.parsing.reader import Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_PREFIX: Final = "call:"
_CLOSING: Final = {"{": "}", "[": "]"}
_SIGN: Final = re.compile(r"[{}\[\],:<]")  # and the beginning of marks


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {CALL: _call})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    name = yield from collected(reader, lambda source, sink: source.while_open(_end_of_name, sink))
    if not name.strip().startswith(_PREFIX) or (yield from reader.peek()) != "{":
        raise NoCall
    begin_call(reader, writer, name.strip().removeprefix(_PREFIX))
    yield from _arguments(reader, _Notation(writer.arguments))
    yield from reader.skip_blanks()
    yield from reader.consume(CALL_END)


def _end_of_name(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in "{<\n"), None)


def _arguments(reader: Reader, notation: _Notation) -> Reading[None]:
    """Read an object; where it breaks off, its JSON does, too."""
    is_open = True
    while is_open:
        yield from reader.while_open(_end_of_bare, notation.add_bare)
        if (yield from reader.consume(QUOTE)):
            is_open = yield from _text(reader, notation)
        elif (yield from reader.consume(CALL_END)) or not (sign := (yield from reader.peek())):
            notation.end_bare()
            is_open = False
        else:
            yield from reader.consume(sign)
            is_open = notation.add_sign(sign)


def _end_of_bare(text: str) -> int | None:
    found = _SIGN.search(text)
    return found.start() if found else None


def _text(reader: Reader, notation: _Notation) -> Reading[bool]:
    """Read a text, and tell whether it ends."""
    notation.begin_text()
    mark = yield from reader.until((QUOTE,), notation.add_text)
    if mark:
        notation.end_text()
    return bool(mark)


class _Notation:
    """Writes JSON from the signs of a value, as they come."""

    def __init__(self, write: Sink) -> None:
        self._write = write
        self._closing: list[str] = []  # of the objects and lists that are open
        self._is_key = False
        self._bare: list[str] = []  # a key, or a value that is no text

    def add_bare(self, text: str) -> None:
        self._bare.append(text)

    def end_bare(self) -> None:
        text = "".join(self._bare).strip()
        self._bare = []
        if text:
            self._write(quoted(text.strip('"')) if self._is_key else json_of(text))

    def begin_text(self) -> None:
        self.end_bare()
        self._write('"')

    def add_text(self, text: str) -> None:
        self._write(quoted(text)[1:-1])

    def end_text(self) -> None:
        self._write('"')

    def add_sign(self, sign: str) -> bool:
        """Return whether anything is still open."""
        if sign == "<" or (sign == ":" and not self._is_key):  # within a value
            self.add_bare(sign)
            return True
        self.end_bare()
        if sign in _CLOSING:
            self._closing.append(_CLOSING[sign])
            self._write(sign)
        elif sign in "}]":
            self._write(self._closing.pop())
        else:
            self._write(f"{sign} ")
        self._is_key = sign != ":" and self._closing[-1:] == ["}"]
        return bool(self._closing)


GEMMA4: Final = ToolFormat(read, in_template=(CALL,), tokens=(CALL, CALL_END, QUOTE))
