"""GLM 4 0414 and Z1: a name on a line of its own, then its arguments as JSON; at the front, or behind a special token.

weather
{"city": "Paris"}
"""

from __future__ import annotations

import re
from typing import Final

from diptych.router.text.parsing.calls import NoCall, ToolFormat, collected, named_call, read_marked, read_or_restore
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Writer

CALL: Final = "<|assistant|>"
_NO_NAME: Final = re.compile(r"[^\w.-]")


def read(reader: Reader, writer: Writer) -> Reading[None]:
    yield from read_or_restore(reader, writer, "", _call)
    yield from read_marked(reader, writer, {CALL: _call})


def _call(reader: Reader, writer: Writer) -> Reading[None]:
    yield from reader.skip_blanks()
    name = yield from collected(reader, lambda source, sink: source.while_open(_end_of_name, sink))
    if not (yield from reader.consume("\n")):
        raise NoCall
    yield from named_call(reader, writer, name)


def _end_of_name(text: str) -> int | None:
    found = _NO_NAME.search(text)
    return found.start() if found else None


GLM4: Final = ToolFormat(
    read,
    in_template=("\u53ef\u7528\u5de5\u5177",),  # "tools at hand", the heading above them
    tokens=(CALL,),
)
