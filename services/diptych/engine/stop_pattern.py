"""Compiles and searches the regular expressions that stop a request.

A pattern is the caller's, hence hostile: its size and repeats are bounded, for compiling time grows with them, and
each search is given a moment only.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import regex

from diptych.common.errors import InvalidRequest

MAX_PATTERN_LEN: Final = 512
MAX_REPEATS: Final = 10_000  # product of all counted repeats of a pattern
SEARCH_TIMEOUT_S: Final = 0.05  # of this process's processor time; sensible searches take a few milliseconds

_REPEATS: Final = regex.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")

Pattern: TypeAlias = regex.Pattern[str]
Match: TypeAlias = regex.Match[str]


def compile_stop(pattern: str) -> Pattern:
    """Raises `InvalidRequest` for a pattern that can't be used, with words that say why."""
    if len(pattern) > MAX_PATTERN_LEN:
        raise _refusal(f"takes patterns of at most {MAX_PATTERN_LEN} characters, not {len(pattern)}")
    counts = [max(int(bound or 1) for bound in found) for found in _REPEATS.findall(pattern)]
    if math.prod(counts) > MAX_REPEATS:
        raise _refusal(f"has repeats that multiply to more than {MAX_REPEATS}: {pattern!r}")
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise _refusal(f"is not a regular expression: {error}: {pattern!r}") from None
    if search(compiled, "", 0, 0):
        raise _refusal(f"matches before the first character: {pattern!r}")
    return compiled


def search(pattern: Pattern, text: str, start: int, end: int, *, partial: bool = False) -> Match | None:
    """Look for a match in `text[start:end]`; also for the beginning of one at the end, if `partial`."""
    try:
        return pattern.search(text, start, end, partial=partial, timeout=SEARCH_TIMEOUT_S)
    except TimeoutError:
        raise _refusal(f"takes too long to search for: {pattern.pattern!r}") from None


def _refusal(words: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {words}", param="stop_regex")
