"""What the formats of calls have in common: content with marked calls in it, and calls written as JSON.

A call counts from the moment its function is known and offered. What breaks before that is content, as it was written;
what breaks after it leaves the arguments as the model wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.router.text.parsing.reader import Nesting, Reader, Reading, Sink
from diptych.router.text.parsing.tool_use import Function
from diptych.router.text.parsing.writer import Read, Writer

ReadCall = Callable[[Reader, Writer], Reading[None]]

NONE: Final = "{}"  # no arguments

_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("id", "type")  # that some models write beside them


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls of tools. Each is a file in `formats` and a line in its registry."""

    read: Read  # a message, but for the reasoning in front
    in_template: Sequence[str]  # any of these in a chat template gives the format away
    tokens: Sequence[str] = ()  # those of its marks that may be special tokens, which texts do not show otherwise
    is_for_all_messages: bool = False  # also for those without calls
    reads_reasoning: bool = False  # reasoning is part of the format
    ends_reasoning: Sequence[str] = ()  # marks of calls that may come where the end of reasoning is forgotten


class NoCall(Exception):
    """What was read since the reader began to hold is no call."""


def read_marked(reader: Reader, writer: Writer, calls: Mapping[str, ReadCall]) -> Reading[None]:
    """Read content to the end, and after each of these marks what it announces."""
    while mark := (yield from reader.until(tuple(calls), writer.content)):
        yield from read_or_restore(reader, writer, mark, calls[mark])


def read_or_restore(reader: Reader, writer: Writer, mark: str, read: ReadCall) -> Reading[bool]:
    """Read calls, the `mark` before them already read, and tell whether they are; else they become content."""
    reader.hold(mark)
    try:
        yield from read(reader, writer)
    except NoCall:
        writer.content(reader.release())
        return False
    reader.release()
    return True


def after(opening: str, read: ReadCall) -> ReadCall:
    """Return a reading of calls that needs another mark before them."""

    def read_all(reader: Reader, writer: Writer) -> Reading[None]:
        yield from reader.skip_blanks()
        yield from _expect(reader, opening)
        yield from read(reader, writer)

    return read_all


def then(read: ReadCall, closing: str) -> ReadCall:
    """Return a reading of calls with a mark after them, which models forget at times."""

    def read_all(reader: Reader, writer: Writer) -> Reading[None]:
        yield from read(reader, writer)
        yield from reader.skip_blanks()
        yield from reader.consume(closing)

    return read_all


def read_from_first(
    reader: Reader, writer: Writer, openings: Mapping[str, ReadCall], calls: Mapping[str, ReadCall]
) -> Reading[None]:
    """Read a message that is calls from its first character, one of `openings`, on; or content, with marked calls."""
    reader.hold()
    yield from reader.skip_blanks()
    blanks = reader.release()
    read = openings.get((yield from reader.peek()))
    if read is None:
        writer.content(blanks)
    else:
        yield from read_or_restore(reader, writer, blanks, read)
    yield from read_marked(reader, writer, calls)


def json_between(opening: str, closing: str) -> Read:
    """Return a reading of messages with calls as JSON between two marks."""

    def read(reader: Reader, writer: Writer) -> Reading[None]:
        yield from read_marked(reader, writer, {opening: then(json_calls, closing)})

    return read


def named_call(reader: Reader, writer: Writer, name: str) -> Reading[None]:
    """Read the arguments of a call, whose name was read before them. Raises `NoCall`."""
    yield from reader.skip_blanks()
    if (yield from reader.peek()) != "{":
        raise NoCall
    begin_call(reader, writer, name)
    yield from json_arguments(reader, writer.arguments)


def begin_call(reader: Reader, writer: Writer, name: str) -> Function:
    """From here on it is a call. Raises `NoCall` for a function that is not offered."""
    if name not in writer.functions:
        raise NoCall
    reader.release()
    return writer.start_call(name)


def json_calls(reader: Reader, writer: Writer) -> Reading[None]:
    """Read a call as a JSON object, or a list of them. Raises `NoCall`."""
    yield from reader.skip_blanks()
    if not (yield from reader.consume("[")):
        yield from json_call(reader, writer)
        return
    separator = ","
    while separator == ",":
        yield from reader.skip_blanks()
        yield from json_call(reader, writer)
        yield from reader.skip_blanks()
        separator = "," if (yield from reader.consume(",")) else "]"
        if separator == ",":
            reader.hold(separator)
    yield from reader.consume("]")


def json_call(reader: Reader, writer: Writer) -> Reading[None]:
    """Read one call: an object with its name and its arguments, in any order. Raises `NoCall`."""
    name, early = "", ""
    more = yield from reader.consume("{")
    while more:
        key = yield from _key(reader)
        if key == "name":
            name = yield from _string(reader)
        elif key in _ARGUMENTS and name:
            yield from _go_on(reader, writer, name)
            return
        elif key in _ARGUMENTS:
            early = yield from collected(reader, json_arguments)
        else:
            yield from _other(reader, key)
        yield from reader.skip_blanks()
        more = yield from reader.consume(",")
    yield from _expect(reader, "}")
    begin_call(reader, writer, name)
    writer.arguments(early or NONE)


def _go_on(reader: Reader, writer: Writer, name: str) -> Reading[None]:
    """Read arguments as they come, and what is left of the object. Raises `NoCall`."""
    begin_call(reader, writer, name)
    yield from json_arguments(reader, writer.arguments)
    yield from _rest(reader)


def _other(reader: Reader, key: str) -> Reading[None]:
    if key not in _OTHERS:
        raise NoCall
    yield from json_value(reader, _ignore)


def json_arguments(reader: Reader, sink: Sink) -> Reading[None]:
    """Read arguments: an object, the text of one in a string, or null for none. They are arguments even if broken."""
    first = yield from reader.peek()
    if first == "{":
        yield from json_value(reader, sink)
    elif first == '"':
        quoted = yield from collected(reader, json_value)
        text = _unquoted(quoted)
        sink(quoted if text is None else text)
    else:
        literal = yield from collected(reader, json_value)
        sink(NONE if literal in ("", "null") else literal)


def collected(reader: Reader, read: Callable[[Reader, Sink], Reading[Any]]) -> Reading[str]:
    """Return all that `read` takes."""
    pieces: list[str] = []
    yield from read(reader, pieces.append)
    return "".join(pieces)


def json_value(reader: Reader, sink: Sink) -> Reading[None]:
    """Read one JSON value of any kind, as far as brackets and quotes tell."""
    first = yield from reader.peek()
    if first and first in '"{[':
        yield from reader.while_open(Nesting().find_end, sink)
    else:
        yield from reader.while_open(_end_of_literal, sink)


def _rest(reader: Reader) -> Reading[None]:
    """Read what an object has after its arguments; an end that is missing is no mistake."""
    yield from reader.skip_blanks()
    while (yield from reader.consume(",")):
        try:
            yield from _key(reader)
        except NoCall:
            return
        yield from json_value(reader, _ignore)
        yield from reader.skip_blanks()
    yield from reader.consume("}")


def _key(reader: Reader) -> Reading[str]:
    yield from reader.skip_blanks()
    key = yield from _string(reader)
    yield from reader.skip_blanks()
    yield from _expect(reader, ":")
    yield from reader.skip_blanks()
    return key


def _string(reader: Reader) -> Reading[str]:
    if (yield from reader.peek()) != '"':
        raise NoCall
    text = _unquoted((yield from collected(reader, json_value)))
    if text is None:
        raise NoCall
    return text


def _unquoted(quoted: str) -> str | None:
    """Return the text of a JSON string; None: it is broken."""
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:
        return None


def _expect(reader: Reader, literal: str) -> Reading[None]:
    if not (yield from reader.consume(literal)):
        raise NoCall


def _ignore(text: str) -> None:
    pass


def _end_of_literal(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in ",]}<" or char.isspace()), None)
