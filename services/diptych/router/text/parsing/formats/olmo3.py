"""OLMo 3: calls as Python writes them, one a line, between tags.

<function_calls>
weather(city="Paris", days=3)
time(zone="CET")
</function_calls>
"""

from __future__ import annotations

from typing import Final

from diptych.router.text.parsing.calls import NoCall, ToolFormat, begin_call, collected, read_marked
from diptych.router.text.parsing.formats.pythonic import QUOTES
from diptych.router.text.parsing.literals import Literals, NoLiteral
from diptych.router.text.parsing.reader import Nesting, Reader, Reading, Sink
from diptych.router.text.parsing.writer import Writer

CALLS, CALLS_END = "<function_calls>", "</function_calls>"
_NAME_ENDS: Final = "(<\n"


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_marked(reader, writer, {CALLS: _calls})


def _calls(reader: Reader, writer: Writer) -> Reading[None]:
    yield from reader.skip_blanks()
    is_open = True
    while is_open:
        yield from _call(reader, writer)
        reader.hold()
        yield from reader.skip_blanks()
        is_end = yield from reader.consume(CALLS_END)
        is_open = not is_end and (yield from reader.peek()) != ""


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    """A call is read when it is complete: until then it might be anything."""
    text = yield from collected(reader, _text_of_call)
    try:
        name, arguments = Literals(text).call()
    except NoLiteral:
        raise NoCall from None
    begin_call(reader, writer, name)
    writer.arguments(arguments)


def _text_of_call(reader: Reader, sink: Sink) -> Reading[None]:
    yield from reader.while_open(_end_of_name, sink)
    if (yield from reader.peek()) == "(":
        yield from reader.while_open(Nesting(quotes=QUOTES).find_end, sink)


def _end_of_name(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in _NAME_ENDS), None)


OLMO3: Final = ToolFormat(read, in_template=(CALLS,), tokens=(CALLS, CALLS_END))
