"""GLM 4.5 and later: the name, then tags for keys and values.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, begin_call, collected, read_marked
from diptych.router.text.parsing.formats.tagged import TaggedArguments
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {CALL: _call})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    name = yield from collected(reader, lambda source, sink: source.while_open(_end_of_name, sink))
    arguments = TaggedArguments(begin_call(reader, writer, name.strip()), writer)
    yield from reader.skip_blanks()
    while (yield from reader.consume(KEY)):
        key = yield from collected(reader, lambda source, sink: source.until((KEY_END,), sink))
        yield from reader.skip_blanks()
        yield from reader.consume(VALUE)
        yield from arguments.read(reader, key, (VALUE_END,))
        yield from reader.skip_blanks()
    arguments.end()
    yield from reader.consume(CALL_END)


def _end_of_name(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in "\n<"), None)


GLM = ToolFormat(read, in_template=(KEY,), tokens=(CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END))
