"""What stop expressions cost a streamed token: searching its text, and checking the expressions of a request.

    python bench/stop_patterns.py [--quick] [--json]

A text of 2,000 tokens is pushed token by token. The limit is one search of each by Python's `re`, which would miss what
lies in two of them; the peer is `re` after each character, in the last 64 of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median
from typing import Final

import re2
from report import Report, arguments

from diptych.generation.stop.conditions import StopRegex
from diptych.generation.stop.pattern import compile_stop

WORDS: Final = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "was",
    "for",
    "are",
    "with",
    "this",
    "have",
    "one",
    "what",
)
CASES: Final[dict[str, tuple[str, ...]]] = {
    "a word": ("Observation:",),
    "a turn": (r"\n\s*Human:", r"\n\s*Assistant:"),
    "a number": (r"\s?(8|9)\b",),
    "any case": ("(?i)the end",),
    "a list of words": (r"\b(?:never|nothing|nowhere|nobody)\b",),
    "a tag": ("(?s)<tool>.*</tool>",),
    "a quoted text, often open": ('t.*?"',),
}
HARD: Final = "a(?:a?|b){137}c"  # the dearest found among those that are taken


def ordinary_text(num_tokens: int, rng: Random) -> list[str]:
    """Return the tokens of some English: mostly a word with the space before it."""
    return [
        rng.choice((f" {rng.choice(WORDS)}", f" {rng.choice(WORDS)}", ",", "ing", ".\n")) for _ in range(num_tokens)
    ]


def pushed(patterns: tuple[str, ...], pieces: Sequence[str]) -> None:
    stop = StopRegex(compile_stop(patterns))
    for piece in pieces:
        assert not stop.push(piece).stopped


def after_each_character(patterns: tuple[str, ...], pieces: Sequence[str]) -> None:
    """Do with `re` what the rule says."""
    searches = [re.compile(pattern).search for pattern in patterns]
    text = ""
    for piece in pieces:
        for end in range(len(text) + 1, len(text) + len(piece) + 1):
            text_so_far = (text + piece)[:end]
            assert not any(search(text_so_far) for search in searches)
        text = (text + piece)[-64:]


def each_piece(patterns: tuple[str, ...], pieces: Sequence[str]) -> None:
    searches = [re.compile(pattern).search for pattern in patterns]
    for piece in pieces:
        assert not any(search(piece) for search in searches)


def least_s(repeats: int, *measured: Callable[[], object]) -> list[float]:
    """Return the shortest time of each, taken in turns."""
    times: list[list[float]] = [[] for _ in measured]
    for _ in range(repeats):
        for taken, run in zip(times, measured, strict=True):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


def measure(report: Report, num_tokens: int, repeats: int) -> None:
    pieces = ordinary_text(num_tokens, Random(1))
    for case, patterns in CASES.items():
        taken = least_s(
            repeats, *(partial(run, patterns, pieces) for run in (pushed, each_piece, after_each_character))
        )
        ours, limit, peer = (1e6 * taken_s / num_tokens for taken_s in taken)
        peers = {"re after each character": peer}
        report.row("stop_patterns", case, ours, "us a token", limit, "one `re` search", limit / ours, peers)


def measure_hard(report: Report, repeats: int) -> None:
    """Measure the dearest: each time in another text, as RE2 remembers what it has seen."""
    pattern, rng = compile_stop((HARD,)), Random(2)
    texts = ["".join(rng.choice("ab") for _ in range(pattern.held_len)).encode() for _ in range(repeats)]
    searches: tuple[Callable[[bytes, int], object], ...] = (pattern.match_start, pattern.held_start)
    searched = [sum(least_s(1, *(partial(search, text, 0) for search in searches))) for text in texts]
    report.row("stop_patterns", "the dearest allowed", 1e6 * median(searched), "us a token")
    report.row("stop_patterns", "the dearest allowed, to check", 1e6 * min(least_s(repeats, check_anew)), "us")


def check_anew() -> None:
    re2.purge()
    compile_stop.cache_clear()
    compile_stop((HARD,))


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__).parse_args()
    with Report(as_json=options.json) as report:
        measure(report, 2000, 5 if options.quick else 25)
        measure_hard(report, 20 if options.quick else 100)


if __name__ == "__main__":
    main()
