"""Llama 3: the whole message is one call as JSON, or several with semicolons between them.

    {"name": "weather", "parameters": {"city": "Paris"}}; {"name": ...}

The special token <|python_tag|> may stand in front, also after some text.
"""

from __future__ import annotations

from diptych.router.text.parsing.calls import ToolFormat, json_calls, read_from_first
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

MARK = "<|python_tag|>"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_from_first(reader, writer, "{", _calls, {MARK: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    yield from json_calls(reader, writer)
    yield from reader.skip_blanks()
    while (yield from reader.consume(";")):
        reader.hold(";")
        yield from json_calls(reader, writer)
        yield from reader.skip_blanks()


LLAMA3 = ToolFormat(read, in_template=(MARK, '{"name": function name, "parameters":'), tokens=(MARK,))
