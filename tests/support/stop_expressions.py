"""Stop expressions: such as people write, and such as are made to cost as much as they can.

    python tests/support/stop_expressions.py 200 1

Checks and searches for so many of the latter, of this seed, under a memory limit, and prints the most that one of them
took. Ends with an error where a bound does not hold.
"""

from __future__ import annotations

import argparse
import resource
import sys
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any

from diptych.common.errors import InvalidRequest
from diptych.generation.stop.conditions import StopRegex
from diptych.generation.stop.pattern import MAX_HELD, StopPattern, compile_stop

MEMORY_BYTES = 256 * 2**20  # beside what the imports took: 128 compiled programs are kept, of 128 KiB each
MAX_CALLS = 15_000  # of Python functions, to check a request's expressions
MAX_STEPS = 160_000  # of searching a token's text: 0.7 ms at most
MAX_LEN = 512

ATOMS = (*"abZ.é🙂", "[ab]", "[^c]", "[^\\w]", "\\w", "\\S", "[é-🙂]", "(?i:k)", "(?i:[!-🙂])", "(?s:.)", "\\b", "\\B")
ATOMS_THAT_FAIL = ("$", "^", "(?=a)", "(?<=a)", "\\1", "(", ")", "[", "{", "(?R)", "\ud800", "\\Z", "(?i)")
REPEATS = ("*", "+", "?", "+?", "{2}", "{9}", "{2,}", "{0,99}", "{1000}", "{1001}", "{4294967294}", "{1,4294967295}")


CHARS = ("a", "b", "c", " ", "-", "é", "\n", "[ab]", "[^a]", ".", "(?s:.)", "\\w", "\\W", "\\s", "[^\\w]", "(?i:A)")
PLACES = ("\\b", "\\B", "^", "$", "\\A", "\\Z", "(?m:^)", "(?m:$)")
OFTEN = ("*", "+", "?", "*?", "+?", "{2}", "{2,}", "{0,2}", "{1,3}")


@dataclass
class Counted:
    """A pattern that counts what is asked of it."""

    pattern: StopPattern
    num_searches: int = 0

    def match_start(self, text: bytes, start: int) -> int | None:
        self.num_searches += 1
        return self.pattern.match_start(text, start)

    def held_start(self, text: bytes, start: int) -> int:
        self.num_searches += 1
        return self.pattern.held_start(text, start)


def ordinary(rng: Random, depth: int = 0) -> str:
    """Return an expression of anything that is understood, over few characters."""
    kind = rng.random() if depth < 4 else 0.0
    if kind < 0.42:
        return rng.choice(CHARS)
    if kind < 0.55:
        return rng.choice(PLACES) + (ordinary(rng, depth + 1) if rng.random() < 0.5 else "")
    first = ordinary(rng, depth + 1)
    if kind < 0.75:
        return first + ordinary(rng, depth + 1)
    if kind < 0.85:
        return f"(?:{first}|{ordinary(rng, depth + 1)})"
    return f"({first}){rng.choice(OFTEN)}"


def hostile(rng: Random) -> str:
    """Return an expression of one of the sorts that have brought engines down."""
    text: str
    atom, repeat, depth = rng.choice(ATOMS), rng.choice(REPEATS), rng.choice((1, 2, 3, 5, 9, 14, 21, 38, 60, 240))
    match rng.randrange(8):
        case 0:
            text = "(?:" * depth + atom + f"){repeat}" * depth + rng.choice(("", "Z"))
        case 1:
            text = "(" * depth + atom + ")" * depth + repeat + "Z"
        case 2:
            text = "|".join(atom + rng.choice(ATOMS) + rng.choice(REPEATS) for _ in range(depth))
        case 3:
            text = f"a{rng.choice(('[ab]', '.', '(?:a?|b)', '[^c]'))}{{{rng.randint(1, 300)}}}c{rng.choice(ATOMS)}"
        case 4:
            text = "(?:" + "".join(rng.choice(ATOMS) + repeat for _ in range(5)) + f"){{{rng.randint(1, 99)}}}Z"
        case 5:
            text = f"(?:{atom}{rng.choice(REPEATS)}|" * depth + "Z" + ")" * depth
        case 6:
            text = "".join(f"{rng.choice(ATOMS)}{rng.choice(REPEATS)}" for _ in range(depth))
        case _:
            text = "".join(rng.choice(ATOMS + ATOMS_THAT_FAIL + REPEATS + ("(?:", "|")) for _ in range(depth))
    return text[:MAX_LEN]


def compiled(patterns: tuple[str, ...]) -> StopPattern | None:
    """Return None where the expressions are refused."""
    try:
        return compile_stop(patterns)
    except InvalidRequest:
        return None


def work(pattern: StopPattern) -> int:
    """Return the steps that one piece of text can take."""
    return (pattern.complete.programsize + pattern.begun.programsize) * pattern.held_len


def search(pattern: StopPattern, text: str, piece_len: int) -> None:
    """Push `text`, counting searches."""
    counted = Counted(pattern)
    stop = StopRegex(counted)  # type: ignore[arg-type]
    for at in range(0, len(text), piece_len):
        counted.num_searches = 0
        stopped = stop.push(text[at : at + piece_len]).stopped
        assert counted.num_searches <= (2 + piece_len.bit_length() if stopped else 2)
        if stopped:
            return


def limit_memory(num_bytes: int) -> None:
    """Let this process have no more than `num_bytes` beside what it has."""
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, taken + num_bytes))


class Calls:
    """Counts calls of Python functions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._on)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "call"


def check(rng: Random) -> tuple[int, int]:
    """Try a request's expressions; return the calls that checking them took, and the steps of searching a piece."""
    patterns = tuple(hostile(rng) for _ in range(rng.choice((1, 1, 1, 1, 4))))
    with Calls() as calls:
        pattern = compiled(patterns)
    assert calls.count <= MAX_CALLS, patterns
    if pattern is None:
        return calls.count, 0
    assert work(pattern) <= MAX_STEPS, patterns
    text = "".join(rng.choice(rng.choice(("a", "ab", "aé🙂"))) for _ in range(MAX_HELD + 200))
    search(pattern, text, rng.choice((7, 90, 300)))
    return calls.count, work(pattern)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("num_examples", type=int)
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    rng = Random(args.seed)
    limit_memory(MEMORY_BYTES)
    taken = [check(rng) for _ in range(args.num_examples)]
    print(f"{sum(steps > 0 for _, steps in taken)} of {args.num_examples} were taken;")
    most_calls, most_steps = (max(numbers) for numbers in zip(*taken, strict=True))
    print(f"at most {most_calls} calls to check, {most_steps} steps a piece")


if __name__ == "__main__":
    main()
