"""Hermes, Qwen 2.5 and 3, and what models without a format of their own are told to write: JSON between tags.

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, json_calls, read_marked, then
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {"<tool_call>": then(json_calls, "</tool_call>")})


HERMES = ToolFormat(read, in_template=("<tool_call>",), tokens=("<tool_call>", "</tool_call>"))
