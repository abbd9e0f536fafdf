"""Decides where streamed text ends before a match of a regular expression.

As if looked for after each character: the match complete first counts, and of those complete at the same character the
leftmost. So the result does not depend on how the text was cut into pieces; `$` means the end of the text so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from diptych.engine.stop import StopResult
from diptych.engine.stop_pattern import Match, compile_stop, search

MAX_HELD: Final = 1024  # characters that wait for a match to become complete; a longer match is not found
CONTEXT_LEN: Final = 64  # characters before these that look-behind can see


class StopRegex:
    """Cuts streamed text before the first match. Text that may yet become one is held back, up to `MAX_HELD`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [compile_stop(pattern) for pattern in patterns]
        self._text = ""  # context and what is held back
        self._start = 0  # of what is held back

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; return what is now known to come before any match."""
        first_end = len(self._text) + 1
        self._text += text
        for end in range(first_end, len(self._text) + 1):
            found = [match.start() for match in self._matches(end, partial=False)]
            if found:
                shown, self._text, self._start = self._text[self._start : min(found)], "", 0
                return StopResult(shown, stopped=True)
        end = len(self._text)
        waiting = [match.start() for match in self._matches(end, partial=True)] if text else [self._start]
        return StopResult(self._show(max(min(waiting, default=end), end - MAX_HELD)), stopped=False)

    def flush(self) -> str:
        """Return what was held back: no more text comes to complete it."""
        return self._show(len(self._text))

    def _matches(self, end: int, *, partial: bool) -> Iterable[Match]:
        found = (search(pattern, self._text, self._start, end, partial=partial) for pattern in self._patterns)
        return [match for match in found if match]

    def _show(self, end: int) -> str:
        """Return the text up to `end`, and forget what nobody can ask for any more."""
        shown = self._text[self._start : end]
        kept = max(0, end - CONTEXT_LEN)
        self._text, self._start = self._text[kept:], end - kept
        return shown
