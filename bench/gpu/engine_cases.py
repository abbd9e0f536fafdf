"""What whole engines are asked, and what came of it: the same for all of them. Standard library alone: peers import it.

A child process serves one engine: it prints a line of `Ready`, then answers each line of `Asked` with one of `Figures`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

WINDOW: Final = 128  # tokens that each request of a decode case gets


class Request(NamedTuple):
    """A prompt, and how many tokens are wanted, whatever they are."""

    token_ids: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are asked at once; lengths of prompts and outputs are uniform between two ends, in tokens."""

    name: str
    count: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]

    def requests(self, num_ids: int) -> list[Request]:
        """Return them with random ids below `num_ids`, which follow from the name: no other case has such a prompt."""
        rng = random.Random(self.name)
        lens = [(rng.randint(*self.prompt_lens), rng.randint(*self.output_lens)) for _ in range(self.count)]
        return [Request(rng.choices(range(num_ids), k=prompt_len), num_tokens) for prompt_len, num_tokens in lens]


@dataclass(frozen=True, slots=True)
class Asked:
    """A line to a child."""

    case: dict[str, Any]
    num_ids: int
    limits: tuple[int, int] | None = None  # prompt tokens of a step, requests at once; None: as the engine has them

    def requests(self) -> list[Request]:
        return Case(**self.case).requests(self.num_ids)


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine's own limits."""

    step_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of all requests of a case."""

    step_s: float  # while all of them have their first token and none has ended; 0: there was no such time
    prompt_tokens_per_s: float  # until the last first token
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float  # between tokens of a request that came one after the other
    gap_p99_s: float


def decode_case(batch_size: int, context: int) -> Case:
    """Return requests that have `context` tokens in the middle of their output."""
    prompt_len = context - WINDOW // 2
    return Case(f"decode {batch_size} x {context}", batch_size, (prompt_len, prompt_len), (WINDOW, WINDOW))


def prompt_case(count: int, prompt_len: int) -> Case:
    return Case(f"{count} prompts of {prompt_len}", count, (prompt_len, prompt_len), (1, 1))


def figures(requests: Sequence[Request], began_s: float, stamps: Sequence[Sequence[float]]) -> Figures:
    """`stamps` has when each request's tokens came, several at once or not. Raises `ValueError` if one got none."""
    if not all(stamps):
        raise ValueError(f"{sum(not each for each in stamps)} of {len(stamps)} requests got no token")
    gaps = [later - sooner for each in stamps for sooner, later in itertools.pairwise(each)]
    first = [each[0] - began_s for each in stamps]
    prompt_tokens = sum(len(request.token_ids) for request in requests)
    took_s = max(each[-1] for each in stamps) - began_s
    return Figures(
        _step_s(stamps),
        prompt_tokens / max(first),
        sum(request.num_tokens for request in requests) / took_s,
        statistics.median(first),
        percentile_99(first),
        statistics.median(gaps) if gaps else 0.0,
        percentile_99(gaps),
    )


def _step_s(stamps: Sequence[Sequence[float]]) -> float:
    """Return the mean time of a step between the last first token and the first last one."""
    start, end = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    steps = statistics.median(sum(start < stamp <= end for stamp in each) for each in stamps)
    return (end - start) / steps if steps else 0.0


def percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else sum(values)


class Child:
    """The end of a child process that talks to who started it; whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, what: Ready | Figures) -> None:
        print(json.dumps(asdict(what)), file=self._answers, flush=True)

    def serve(self, answer: Callable[[Asked], Figures]) -> None:
        """Answer until standard input ends."""
        for line in sys.stdin:
            self.say(answer(Asked(**json.loads(line))))
