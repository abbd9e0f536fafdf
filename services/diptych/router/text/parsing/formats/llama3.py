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
    yield from read_from_first(reader, writer, {"{": json_objects}, {MARK: json_objects})


def json_objects(reader: Reader, writer: Writer) -> Reading[None]:
    """Read calls one after the other. Raises `NoCall`."""
    yield from json_calls(reader, writer)
    yield from reader.skip_blanks()
    while (separator := (yield from _separator(reader))) is not None:
        reader.hold(separator)
        yield from json_calls(reader, writer)
        yield from reader.skip_blanks()


def _separator(reader: Reader) -> Reading[str | None]:
    """Read what is between two calls, which Llama 4 writes without anything; None: no other one follows."""
    if (yield from reader.consume(";")):
        return ";"
    return "" if (yield from reader.peek()) == "{" else None


LLAMA3 = ToolFormat(read, in_template=(MARK, '{"name": function name, "parameters":'), tokens=(MARK,))
