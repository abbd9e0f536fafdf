"""Stop expressions of any sort: what they find, and what they cost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from random import Random

import pytest
import stop_expressions
from fuzzing import NUM_EXAMPLES
from stop_expressions import compiled, ordinary

from diptych.generation.stop.conditions import StopRegex
from diptych.generation.stop.pattern import StopPattern


def read(pattern: StopPattern, pieces: Iterator[str]) -> tuple[str, bool]:
    stop, shown = StopRegex(pattern), ""
    for piece in pieces:
        result = stop.push(piece)
        shown += result.text
        if result.stopped:
            return shown, True
    return shown + stop.flush(), False


def cut(text: str, rng: Random) -> Iterator[str]:
    while text:
        length = rng.randint(0, 5)
        yield text[:length]
        text = text[length:]


def reference(patterns: Sequence[str], text: str) -> tuple[str, bool]:
    """Look for each pattern after each character, with Python's engine."""
    searches = [re.compile(pattern, re.ASCII).search for pattern in patterns]
    for end in range(1, len(text) + 1):
        found = [match.start() for search in searches if (match := search(text[:end]))]
        if found:
            return text[: min(found)], True
    return text, False


def test_text_ends_where_python_finds_a_match_after_each_character_wherever_it_was_cut() -> None:
    rng, num_taken, num_stopped = Random(NUM_EXAMPLES), 0, 0
    for _ in range(40 * NUM_EXAMPLES):
        patterns = tuple(ordinary(rng) + rng.choice(("", ordinary(rng))) for _ in range(rng.choice((1, 1, 2))))
        pattern = compiled(patterns)
        if pattern is None:
            continue
        num_taken += 1
        text = "".join(rng.choice("aabbcA -é\n") for _ in range(rng.randint(1, 14)))
        wanted = reference(patterns, text)
        assert read(pattern, cut(text, rng)) == wanted, (patterns, text)
        num_stopped += wanted[1]
    assert num_taken > 20 * NUM_EXAMPLES
    assert num_taken // 4 < num_stopped < num_taken


@pytest.mark.integration
def test_what_is_made_to_cost_much_is_refused_or_bounded_in_memory_steps_and_searches() -> None:
    """The bounds, and the memory limit, are in `stop_expressions`: it may die of them, hence in its own process."""
    command = [sys.executable, stop_expressions.__file__, str(25 * NUM_EXAMPLES), str(NUM_EXAMPLES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr
    num_taken = int(ended.stdout.split()[0])
    assert num_taken > NUM_EXAMPLES
