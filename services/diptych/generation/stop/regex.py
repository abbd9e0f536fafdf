"""Decides where streamed text ends before a match of a regular expression.

As if looked for after each character: the match complete first counts, and of those complete at the same character the
leftmost. So the result does not depend on how the text was cut into pieces; `$` means the end of the text so far.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from diptych.generation.stop.conditions import StopResult
from diptych.generation.stop.pattern import MAX_HELD


class Pattern(Protocol):
    """What to look for. Positions are in bytes of UTF-8."""

    def match_start(self, text: bytes, start: int) -> int | None:
        """Return where the leftmost match from `start` on begins."""
        ...

    def held_start(self, text: bytes, start: int) -> int:
        """Return where, from `start` on, the text begins that may become a match; its end, if none may."""
        ...


class StopRegex:
    """Cuts streamed text before the first match. Text that may yet become one is held back, up to `MAX_HELD`.

    A piece is searched once for a match and once for the beginning of one; a piece with a match a few times more, as it
    is the last.
    """

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._text = b""  # the character before, and what is held back
        self._start = 0  # of what is held back

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; return what is now known to come before any match."""
        if not text:
            return StopResult("", stopped=False)
        before, self._text = self._text, self._text + _encoded(text)
        if self._pattern.match_start(self._text, self._start) is not None:
            return self._stop(before, text)
        held = self._pattern.held_start(self._text, self._start)
        return StopResult(self._show(max(held, self._start_of_last(MAX_HELD))), stopped=False)

    def flush(self) -> str:
        """Return what was held back: no more text comes to complete it."""
        return self._show(len(self._text))

    def _stop(self, before: bytes, text: str) -> StopResult:
        """Find the first character at which a match is complete; once complete, one is found in all longer texts."""

        def match_start(length: int) -> int | None:
            return self._pattern.match_start(before + _encoded(text[:length]), self._start)

        length = 1 + bisect_left(range(1, len(text)), True, key=lambda length: match_start(length) is not None)
        shown = self._text[self._start : match_start(length)]
        self._text, self._start = b"", 0
        return StopResult(_decoded(shown), stopped=True)

    def _start_of_last(self, num_chars: int) -> int:
        """Return where the last `num_chars` characters begin."""
        if len(self._text) - self._start <= num_chars:
            return self._start
        return len(self._text) - len(_encoded(_decoded(self._text[self._start :])[-num_chars:]))

    def _show(self, end: int) -> str:
        """Return the text up to `end`, and forget what nobody can ask for any more."""
        shown = _decoded(self._text[self._start : end])
        kept = _encoded(shown[-1:]) or self._text[: self._start]
        self._text, self._start = kept + self._text[end:], len(kept)
        return shown


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode(errors="surrogatepass")
