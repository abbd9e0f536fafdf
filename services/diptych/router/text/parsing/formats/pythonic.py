"""Llama 3.2 and 4, and others: the whole message is a Python list of calls.

[weather(city="Paris", days=3), time(zone='CET')]
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import NoCall, begin_call, collected, read_marked, read_or_restore
from diptych.router.text.parsing.formats.literals import Literals, NoLiteral
from diptych.router.text.parsing.nesting import Nesting
from diptych.router.text.parsing.reader import Reader, Reading, Take
from diptych.router.text.parsing.tool_format import ToolFormat
from diptych.router.text.parsing.writer import Writer

MARK, MARK_END = "<|python_start|>", "<|python_end|>"
_QUOTES: Final = "\"'"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    reader.hold()
    yield from reader.skip_blanks()
    blanks = reader.release()
    if (yield from reader.peek()) == "[":
        yield from read_or_restore(reader, writer, blanks, _calls)
    else:
        writer.content(blanks)
    yield from read_marked(reader, writer, {MARK: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    """The list is read when it is complete: until then it might be anything."""
    text = yield from collected(reader, _list)
    try:
        calls = Literals(text).calls()
    except NoLiteral:
        raise NoCall from None
    if not all(name in writer.functions for name, _ in calls):
        raise NoCall
    for name, arguments in calls:
        begin_call(reader, writer, name)
        writer.arguments(arguments)
    yield from reader.skip_blanks()
    yield from reader.take(MARK_END)


def _list(reader: Reader, take: Take) -> Reading[bool]:
    return reader.while_open(Nesting(quotes=_QUOTES).find_end, take)


PYTHONIC = ToolFormat(read, in_template=(MARK,), tokens=(MARK, MARK_END))
