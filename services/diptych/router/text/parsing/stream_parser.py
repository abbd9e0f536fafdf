"""Turns a reading, written as a generator over the whole text, into a `MessageParser`."""

from __future__ import annotations

from collections.abc import Callable

from diptych.router.text.parsing.parts import Part
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

Read = Callable[[Reader, Writer], Reading[None]]  # reads a whole message


class StreamParser:
    """Reads one message."""

    def __init__(self, read: Read, writer: Writer) -> None:
        self._reader = Reader()
        self._writer = writer
        self._reading = read(self._reader, writer)

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        next(self._reading)
        return self._writer.take_parts()

    def finish(self) -> list[Part]:
        self._reader.end()
        for _ in self._reading:
            raise AssertionError("at the end of the text a reading waits for more")
        self._writer.end()
        return self._writer.take_parts()
