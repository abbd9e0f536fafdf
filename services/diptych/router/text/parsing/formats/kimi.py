"""Kimi K2 and Kimi Linear: special tokens; a call is named by its function and its number.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, after, collected, named_call, read_marked, then
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    calls = then(_call, END)
    yield from read_marked(reader, writer, {BEGIN: after(CALL, calls), CALL: calls})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    label = yield from collected(reader, lambda source, sink: source.until((ARGUMENTS,), sink))
    yield from named_call(reader, writer, label.strip().removeprefix("functions.").partition(":")[0])
    yield from reader.skip_blanks()
    yield from reader.consume(CALL_END)


KIMI = ToolFormat(
    read, in_template=(CALL,), tokens=(BEGIN, END, CALL, ARGUMENTS, CALL_END), ends_reasoning=(BEGIN, CALL)
)
