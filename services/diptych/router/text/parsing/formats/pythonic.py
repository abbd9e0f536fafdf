"""Llama 4, and fine-tunes of Llama 3.2: the whole message is a Python list of calls.

[weather(city="Paris", days=3), time(zone='CET')]

The published template of Llama 4 asks for JSON as Llama 3 writes it, which is read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.router.text.parsing.calls import (
    NoCall,
    ReadCall,
    ToolFormat,
    begin_call,
    collected,
    read_from_first,
    then,
)
from diptych.router.text.parsing.formats.llama3 import json_objects
from diptych.router.text.parsing.literals import Literals, NoLiteral
from diptych.router.text.parsing.reader import Nesting, Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

MARK, MARK_END = "<|python_start|>", "<|python_end|>"
QUOTES: Final = "\"'"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_from_first(reader, writer, _OPENINGS, {MARK: _calls, MARK_END: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    yield from reader.skip_blanks()
    read = _OPENINGS.get((yield from reader.peek()))
    if read is None:
        raise NoCall
    yield from read(reader, writer)


def _list(reader: Reader, writer: Writer) -> Reading[None]:
    """The list is read when it is complete: until then it might be anything."""
    text = yield from collected(reader, _in_brackets)
    write_list(reader, writer, text)


def _in_brackets(reader: Reader, sink: Sink) -> Reading[bool]:
    return reader.while_open(Nesting(quotes=QUOTES).find_end, sink)


def write_list(reader: Reader, writer: Writer, text: str) -> None:
    """Write the calls of a list. Raises `NoCall` if it is something else, or calls what is not offered."""
    try:
        calls = Literals(text).calls()
    except NoLiteral:
        raise NoCall from None
    if not all(name in writer.functions for name, _ in calls):
        raise NoCall
    for name, arguments in calls:
        begin_call(reader, writer, name)
        writer.arguments(arguments)


_OPENINGS: Final[Mapping[str, ReadCall]] = {"[": then(_list, MARK_END), "{": then(json_objects, MARK_END)}

PYTHONIC: Final = ToolFormat(read, in_template=(MARK,), tokens=(MARK, MARK_END))
