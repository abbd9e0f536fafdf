"""Collects the parts of one message and numbers its calls.

Blanks around reasoning and calls separate them, and are no part of the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from diptych.router.text.parsing.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.tool_use import Function, ToolUse

Read: TypeAlias = "Callable[[Reader, Writer], Reading[None]]"  # reads a whole message


class Writer:
    """What a parser says of the text it reads."""

    def __init__(self, tool_use: ToolUse, new_id: Callable[[], str]) -> None:
        self.functions = {function.name: function for function in tool_use.functions}  # that may be called
        self._max_calls = None if tool_use.parallel else 1
        self._new_id = new_id
        self._parts: list[Part] = []
        self._kind: type[Part] | None = None  # of the last part
        self._blanks = ""  # at its end: nobody's, if a part of another kind follows
        self._num_calls = 0

    def content(self, text: str) -> None:
        self._write(Content, text)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text)

    def separate(self) -> None:
        """What follows is another piece of the message: blanks before and behind belong to neither."""
        self._kind, self._blanks = ToolCallStart, ""

    def start_call(self, name: str) -> Function:
        """Begin a call of one of `functions`."""
        self.separate()
        self._num_calls += 1
        if self._is_heard:
            self._parts.append(ToolCallStart(self._num_calls - 1, self._new_id(), name))
        return self.functions[name]

    def arguments(self, text: str) -> None:
        """Go on with the arguments of the call begun last."""
        if text and self._is_heard:
            self._parts.append(ToolArguments(self._num_calls - 1, _sendable(text)))

    def pop_parts(self) -> list[Part]:
        """Return what is new."""
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> None:
        """Nothing more is said."""
        if self._kind is Content and self._blanks:
            self._parts.append(Content(self._blanks))

    @property
    def _is_heard(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _write(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if kind is not self._kind:
            text = text if self._kind is None and kind is Content else text.lstrip()
            if not text:
                return
            self._kind, self._blanks = kind, ""
        said = text.rstrip()
        if said:
            self._parts.append(kind(self._blanks + said))
            self._blanks = text[len(said) :]
        else:
            self._blanks += text


def _sendable(text: str) -> str:
    """Escapes that a model wrote may name half a character, which no message can carry."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class StreamParser:
    """Reads one message: a `MessageParser` of a reading that is written as a generator over the whole text."""

    def __init__(self, read: Read, writer: Writer) -> None:
        self._reader = Reader()
        self._writer = writer
        self._reading = read(self._reader, writer)

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        next(self._reading)
        return self._writer.pop_parts()

    def finish(self) -> list[Part]:
        self._reader.end()
        for _ in self._reading:
            raise AssertionError("at the end of the text a reading waits for more")
        self._writer.end()
        return self._writer.pop_parts()
