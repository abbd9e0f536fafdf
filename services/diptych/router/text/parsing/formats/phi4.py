"""Phi 4 mini and Granite 3.0: a mark, and a list of calls as JSON.

functools[{"name": "weather", "arguments": {"city": "Paris"}}]
<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, json_calls, read_marked, then
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

CALL, CALL_END = "<|tool_call|>", "<|/tool_call|>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {"functools": json_calls, CALL: then(json_calls, CALL_END)})


PHI4 = ToolFormat(read, in_template=("<|tool|>", CALL), tokens=(CALL, CALL_END))
