"""How much a JSON text would become in memory: told from its bytes, before anything is made of them. Pure.

A value takes two bytes of text and up to a hundred of memory, and whoever makes it keeps the interpreter's lock until
all are made. So they are counted first, in steps that let others run. Marks within strings are no values: they are
counted along at first, which takes no time; a text with many of them, code say, is looked at again without its strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from diptych.common.errors import InvalidRequest

MAX_VALUES: Final = 2**20  # the tokens of long prompts are some
MAX_NAMES: Final = 2**16  # of fields
MAX_CONTAINERS: Final = 2**16  # objects and lists
SMALL_BYTES: Final = 2**16  # have too few of anything to count them
QUICK_BYTES: Final = 2**18  # are read in about a millisecond
QUICK_CONTAINERS: Final = 2**10  # likewise
_PIECE_BYTES: Final = 2**16
_ESCAPED: Final = re.compile(rb"\\*.?", re.DOTALL)  # the rest of what a cut may have parted


class Extent(NamedTuple):
    """Upper bounds of what a text holds."""

    values: int
    names: int
    containers: int

    @property
    def is_allowed(self) -> bool:
        return self.values <= MAX_VALUES and self.names <= MAX_NAMES and self.containers <= MAX_CONTAINERS


def check_extent(text: bytes) -> None:
    """Raise `InvalidRequest` if a JSON text holds more than is ever read."""
    if len(text) <= SMALL_BYTES or _marks(text).is_allowed:
        return
    extent = Extent(0, 0, 0)
    for piece in _without_strings(text):
        extent = Extent(*map(sum, zip(extent, _marks(piece), strict=True)))
        if not extent.is_allowed:
            words = f"{MAX_VALUES} values, {MAX_NAMES} fields and {MAX_CONTAINERS} objects and lists"
            raise InvalidRequest(f"the body holds too much: it may have at most {words}")


def is_quick(text: bytes) -> bool:
    """Whether a JSON text is read so soon that nobody notices."""
    return len(text) <= SMALL_BYTES // 4 or (len(text) <= QUICK_BYTES and text.count(b"{") <= QUICK_CONTAINERS)


def _marks(text: bytes) -> Extent:
    return Extent(text.count(b","), text.count(b":"), text.count(b"[") + text.count(b"{"))


def _without_strings(text: bytes) -> Iterator[bytes]:
    """Give the text piece by piece. What is no JSON is right as far as somebody would read it: to the first mistake."""
    begin, is_inside = 0, 0
    while begin < len(text):
        end = begin + _PIECE_BYTES
        if text[end - 1 : end] == b"\\":
            end = _end_of_escapes(text, end)
        parts = text[begin:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside = (is_inside + len(parts) - 1) % 2
        begin = end


def _end_of_escapes(text: bytes, at: int) -> int:
    """Return where no character is escaped by one before."""
    found = _ESCAPED.match(text, at)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()
