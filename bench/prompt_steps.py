"""Times to first tokens of a prefill worker, by what may share a step with a prompt: its real queue, in simulated time.

Poisson arrivals of prompts that nobody has cached. A step takes what one of an 8B model took on an H200: `STEP_S`, and
`TOKEN_S` a token at the start of a prompt (`bench/results/gpu.md`). *Packed*: every step is filled up, as most engines
do; *later*: the rule with other numbers in place of `LATER`. The limit is a prompt alone on an idle worker. Nothing
here depends on the machine.

    python bench/prompt_steps.py [--quick] [--json]
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final
from unittest.mock import patch

import numpy as np
from report import Report, arguments

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule import extend_queue
from diptych.engine.schedule.extend_queue import ExtendQueue
from diptych.engine.schedule.waiting_queue import new_waiting_queue
from diptych.engine.values import prompt_cost
from diptych.engine.values.limits import Limits, Scheduling
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.request import new_request
from diptych.engine.values.step import new_step
from diptych.generation.sampling_params import SamplingParams

STEP_S: Final = 4.0e-3
TOKEN_S: Final = 23.0e-6
COST: Final = PromptCost(26_600)  # of Llama-3-8B
PAGE_SIZE: Final = 16
NUM_PAGES: Final = 1 << 16
MAX_REQUESTS: Final = 256
CONTEXT_LEN: Final = 1 << 17
LENGTHS: Final[dict[str, tuple[int, ...]]] = {
    "500": (500,),
    "2000": (2000,),
    "4000": (4000,),
    "8000": (8000,),
    "200 and 8000": (200, 200, 200, 8000),
}
LOADS: Final = (0.4, 0.7, 0.9, 1.1)  # of what steps of one prompt each could do
BUDGETS: Final = (4096, 8192)
NUM_PROMPTS: Final = 600
OURS: Final = "ours"


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_len: int


def arrivals(lengths: tuple[int, ...], load: float, num_prompts: int) -> list[Arrival]:
    rng, at_s = random.Random(7), 0.0
    mean_s = statistics.mean(map(alone_s, lengths))
    found = []
    for _ in range(num_prompts):
        at_s += rng.expovariate(load / mean_s)
        found.append(Arrival(at_s, rng.choice(lengths)))
    return found


def alone_s(prompt_len: int) -> float:
    """A prompt in one step."""
    return STEP_S + chunk_s(0, prompt_len)


def chunk_s(start: int, num_tokens: int) -> float:
    return TOKEN_S * num_tokens * (1 + (start + num_tokens / 2) / COST.even_len)


def ttfts(coming: list[Arrival], budget: int) -> Iterator[float]:
    """Yield the time to first token of each prompt, in the order of their ends."""
    cache = KvCache(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=MAX_REQUESTS, max_tokens_per_request=CONTEXT_LEN
    )
    waiting = new_waiting_queue(cache, Scheduling())
    limits = Limits(
        CONTEXT_LEN, CONTEXT_LEN, frozenset(), max_step_tokens=budget, max_requests=MAX_REQUESTS, prompt_cost=COST
    )
    queue, now_s, next_arrival = ExtendQueue(cache, waiting, limits), 0.0, 0
    while next_arrival < len(coming) or len(queue):
        if not len(queue):
            now_s = max(now_s, coming[next_arrival].at_s)
        while next_arrival < len(coming) and coming[next_arrival].at_s <= now_s:
            tokens = np.full(coming[next_arrival].prompt_len, next_arrival)
            waiting.add(new_request(next_arrival, tokens, SamplingParams(max_tokens=1)))
            next_arrival += 1
        chunks = queue.plan(now_s, budget, lambda request: 0)
        now_s += STEP_S + sum(chunk_s(chunk.start, chunk.num_tokens) for chunk in chunks)
        new_step((), chunks).launch()
        for request in queue.launch(chunks):
            cache.drop(request)
            yield now_s - coming[request.room].at_s


def rules() -> dict[str, AbstractContextManager[object]]:
    """Return ours, and others."""
    others = {f"later {number}": patch.object(prompt_cost, "LATER", number) for number in (1, 24)}
    return {OURS: nullcontext(), "packed": patch.object(extend_queue, "pays_to_share", lambda *_: True), **others}


def main() -> None:
    options = arguments(__doc__).parse_args()
    budgets, loads = (BUDGETS[1:2], LOADS[1:2]) if options.quick else (BUDGETS, LOADS)
    with Report(as_json=options.json) as report:
        for name, lengths in LENGTHS.items():
            for budget in budgets:
                for load in loads:
                    add_to_report(report, name, lengths, budget, load)


def add_to_report(report: Report, name: str, lengths: tuple[int, ...], budget: int, load: float) -> None:
    coming = arrivals(lengths, load, NUM_PROMPTS)
    found = {rule: run(coming, budget, context) for rule, context in rules().items()}
    limit = 1e3 * statistics.mean(alone_s(each.prompt_len) for each in coming)
    case = f"prompts of {name}, steps of {budget}, load {load:g}"
    for what, pick in (("mean", statistics.mean), ("p99", lambda times: times[len(times) * 99 // 100])):
        values = {rule: 1e3 * pick(times) for rule, times in found.items()}
        value = values.pop(OURS)
        report.row("prompt_steps", f"{case}: {what}", value, "ms", limit, "alone", limit / value, values)


def run(coming: list[Arrival], budget: int, rule: AbstractContextManager[object]) -> list[float]:
    with rule:
        return sorted(ttfts(coming, budget))


if __name__ == "__main__":
    main()
