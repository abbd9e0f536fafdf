"""Granite 3.3 and Ernie 4.5 Thinking: JSON behind a mark or between tags, and the answer between tags, too.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>

<response>
It is sunny.
</response>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.router.text.parsing.calls import ReadCall, ToolFormat, json_calls, read_marked, then
from diptych.router.text.parsing.formats import hermes, phi4
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

ANSWER, ANSWER_END = "<response>", "</response>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, _MARKS)


def _tag(reader: Reader, writer: Writer) -> Reading[None]:
    """Read a tag of the answer, which is no part of it."""
    writer.separate()
    yield from reader.skip_blanks()


_MARKS: Final[Mapping[str, ReadCall]] = {
    ANSWER: _tag,
    ANSWER_END: _tag,
    phi4.CALL: then(json_calls, phi4.CALL_END),
    hermes.CALL: then(json_calls, hermes.CALL_END),
}

GRANITE: Final = ToolFormat(
    read,
    in_template=(ANSWER,),
    tokens=(ANSWER, ANSWER_END, phi4.CALL, hermes.CALL, hermes.CALL_END),
    is_for_all_messages=True,
)
