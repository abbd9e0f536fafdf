"""Lets a parser be written as if the whole text were there: a generator that yields where it needs more of it.

Rule: what is read depends on the text alone, never on how it was cut; so a reader that could be mistaken waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]  # yields to get more text; returns what was read
Sink = Callable[[str], None]


class Reader:
    """The text of a message, read from the front."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what is before has been read
        self._held: list[str] | None = None  # what has been read since `hold`, should it be needed again
        self._ended = False

    # by whoever has the text

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    # by the parser

    def hold(self, text: str = "") -> None:
        """Remember from here on what is read, as if `text` had just been."""
        self._held = [text]

    def release(self) -> str:
        """Return what was read since `hold`, and remember no more."""
        held, self._held = "".join(self._held or ()), None
        return held

    def back(self, mark: str) -> None:
        """Make what was read last, and is not held, the next to be read again."""
        assert self._held is None, "what is held would be there twice"
        self._at -= len(mark)
        assert self._text.startswith(mark, self._at), "nothing else was read last"

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip_blanks(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self._consume(self._at + 1)

    def consume(self, literal: str) -> Reading[bool]:
        """Read `literal` if the text goes on with it, and tell whether it does."""
        while not self._ended and self._may_become(literal):
            yield
        found = self._text.startswith(literal, self._at)
        if found:
            self._consume(self._at + len(literal))
        return found

    def until(self, marks: Sequence[str], sink: Sink) -> Reading[str]:
        """Read up to the mark that is complete first, and past it; return it, "" at the end of the text."""
        beginnings = {mark[:1] for mark in marks}
        while True:
            found = _first(self._text, self._at, marks)
            if found is not None:
                start, mark = found
                sink(self._consume(start))
                self._consume(start + len(mark))
                return mark
            may_begin = not self._ended and any(self._text.find(char, self._at) >= 0 for char in beginnings)
            num_kept = _num_open(self._text, self._at, marks) if may_begin else 0
            sink(self._consume(len(self._text) - num_kept))
            if self._ended:
                return ""
            yield

    def while_open(self, find_end: Callable[[str], int | None], sink: Sink) -> Reading[bool]:
        """Read on until `find_end`, which sees each piece once, says where it ends; tell whether it did."""
        while True:
            end = find_end(self._text[self._at :])
            sink(self._consume(len(self._text) if end is None else self._at + end))
            if end is not None or self._ended:
                return end is not None
            yield

    def _may_become(self, literal: str) -> bool:
        num_left = len(self._text) - self._at
        return num_left < len(literal) and self._text.endswith(literal[:num_left])

    def _consume(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(taken)
        return taken


def _first(text: str, start: int, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return the mark that is complete first, with its place; of those complete at one character, the longest."""
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    if not found:
        return None
    _, at, mark = min(found)
    return at, mark


def _num_open(text: str, start: int, marks: Sequence[str]) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    longest = min(max(map(len, marks)) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class Nesting:
    """Finds where a value in quotes or brackets ends, piece by piece, valid or not. Any bracket closes any other."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._quote = ""  # the one that is open
        self._depth = 0
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Return the place after the value's last character, if that is in this piece."""
        for at, char in enumerate(text):
            self._pass(char)
            if not self._depth and not self._quote:
                return at + 1
        return None

    def _pass(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in self._quotes:
            self._quote = char
        else:
            self._depth += (char in "{[(") - (char in "}])")
