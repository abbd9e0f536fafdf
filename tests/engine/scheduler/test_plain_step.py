"""What plain steps and plain requests cost a scheduler: calls, which no other work of a machine changes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scheduler import CONTEXT_LEN, GREEDY, VOCAB_SIZE, InstantRunner, Load, local_core, one_by_one, serve

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.batch import StepResult
from diptych.engine.values.events import Start
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams

MOST_CALLS = 286  # of Python and C functions, in the mean of many steps; at 84deebe there were 278


def calls_of(run: Callable[..., Any], *args: Any) -> int:
    profile = cProfile.Profile()
    profile.runcall(run, *args)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


def steps(num_steps: int) -> None:
    load = Load(16, num_steps, 4000, GREEDY)  # so that as many requests are told of, whatever the number of steps
    serve(InstantRunner, one_by_one, load)


def requests(count: int, max_tokens: int) -> None:
    """Run so many requests with prompts that differ, 32 at a time, in a core that has nobody else."""
    cache = KvCache(num_pages=300, page_size=16, max_requests=32 + PROMPT_ROWS, max_tokens_per_request=CONTEXT_LEN)
    core = local_core(cache, Limits(CONTEXT_LEN, VOCAB_SIZE, frozenset({2}), 8192, 32))
    params, rng = SamplingParams(max_tokens=max_tokens, ignore_eos=True), np.random.default_rng(1)
    for room in range(1, count + 1):
        core.handle(Start(new_request(room, rng.integers(0, VOCAB_SIZE, 100), params)), 0.0)
    while (batch := core.plan(0.0)) is not None:
        core.commit(StepResult(np.full(batch.num_samples, 7)), 0.0)
        core.pop_effects()
    assert core.report().num_open_rooms == 0


def test_a_plain_step_of_sixteen_requests_makes_few_calls() -> None:
    calls_of(steps, 20)  # what is made once
    assert (calls_of(steps, 160) - calls_of(steps, 80)) / 80 <= MOST_CALLS


@pytest.mark.parametrize(("max_tokens", "most_calls"), [(1, 580), (20, 885)])
def test_a_plain_request_makes_few_calls(max_tokens: int, most_calls: int) -> None:
    calls_of(requests, 32, max_tokens)
    assert (calls_of(requests, 192, max_tokens) - calls_of(requests, 96, max_tokens)) / 96 <= most_calls
