"""LFM2: a Python list of calls, or of calls as JSON, between special tokens.

<|tool_call_start|>[weather(city="Paris"), time(zone='CET')]<|tool_call_end|>

Texts are not escaped, so only the token tells where the list ends.
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import ToolFormat, collected, json_calls, read_marked
from diptych.router.text.parsing.formats.pythonic import write_list
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

CALLS, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
_TOOLS: Final = "<|tool_list_start|>"  # all that the first templates show of the family


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {CALLS: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    yield from reader.skip_blanks()
    if (yield from reader.peek()) == "{":
        yield from json_calls(reader, writer)
        yield from reader.skip_blanks()
        yield from reader.consume(CALLS_END)
    else:
        text = yield from collected(reader, lambda source, sink: source.until((CALLS_END,), sink))
        write_list(reader, writer, text)


LFM2: Final = ToolFormat(read, in_template=(CALLS, _TOOLS), tokens=(CALLS, CALLS_END))
