"""Qwen 3 Coder: tags for function and parameters.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, after, begin_call, collected, read_marked, then
from diptych.router.text.parsing.formats.tagged import TaggedArguments
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    calls = then(_call, END)
    yield from read_marked(reader, writer, {BEGIN: after(FUNCTION, calls), FUNCTION: calls})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    name = yield from collected(reader, lambda source, sink: source.until((">",), sink))
    arguments = TaggedArguments(begin_call(reader, writer, name.strip()), writer)
    yield from reader.skip_blanks()
    while (yield from reader.consume(PARAMETER)):
        parameter = yield from collected(reader, lambda source, sink: source.until((">",), sink))
        yield from reader.consume("\n")
        yield from arguments.read(reader, parameter.strip(), ("\n" + PARAMETER_END, PARAMETER_END))
        yield from reader.skip_blanks()
    arguments.end()
    yield from reader.consume(FUNCTION_END)


QWEN3_CODER = ToolFormat(read, in_template=(FUNCTION,), tokens=(BEGIN, END))
