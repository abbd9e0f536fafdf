"""Mistral: a special token, then a list of calls as JSON, or since 2025 a name and its arguments.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat, collected, json_calls, named_call, read_marked
from diptych.router.text.parsing.reader import Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

CALL, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_ENDS: Final = " {[\n"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {CALL: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    yield from reader.skip_blanks()
    first = yield from reader.peek()
    if first and first in "[{":
        yield from json_calls(reader, writer)
    else:
        yield from _with_name(reader, writer)


def _with_name(reader: Reader, writer: Writer) -> Reading[None]:
    name = yield from collected(reader, _name)
    if (yield from reader.consume(CALL_ID)):
        yield from collected(reader, _name)
    yield from reader.consume(ARGUMENTS)
    yield from named_call(reader, writer, name)


def _name(reader: Reader, sink: Sink) -> Reading[bool]:
    return reader.while_open(_end_of_name, sink)


def _end_of_name(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in _NAME_ENDS), None)


MISTRAL = ToolFormat(read, in_template=(CALL,), tokens=(CALL, CALL_ID, ARGUMENTS))
