from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.members.roles import Role
from diptych.engine.values.step_model import StepModel
from diptych.generation.slo import Slo
from diptych.simulator.fluid import fluid, most_done, new_tokens, work
from diptych.simulator.report.summary import summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call
from diptych.simulator.traces.generators.named import generate

NEVER = float("inf")


def done(*jobs: tuple[float, float, float], num_workers: int = 1) -> float:
    """Each job: from, to, work."""
    from_s, to_s, work_s = (np.array(each, np.float64) for each in zip(*jobs, strict=True))
    return most_done(from_s, to_s, work_s, num_workers)


@pytest.mark.parametrize(
    ("jobs", "num_workers", "most"),
    [
        ([(0, 1, 1)] * 3, 1, 1.0),
        ([(0, 1, 1)] * 3, 2, 2.0),
        ([(0, 2, 1)] * 3, 1, 2.0),
        ([(0, 4, 3), (0, 4, 2)], 1, 1 + 2 / 3),  # the smaller one first, and what is left of the other
        ([(0, 4, 3), (1, 2, 1)], 1, 2.0),
        ([(0, 4, 3.5), (1, 2, 1)], 1, 1 + 3 / 3.5),
        ([(0, 1, 1), (3, 4, 1), (0, 4, 3)], 1, 2 + 2 / 3),
        ([(0, 1, 2), (0, 1, 1)], 4, 1.0),  # no worker does the first in its time
        ([(0, NEVER, 9), (0, 1, 1)], 1, 2.0),
        ([(0, NEVER, 9)], 1, 1.0),
    ],
)
def test_as_much_is_done_as_time_allows(jobs: list[tuple[float, float, float]], num_workers: int, most: float) -> None:
    assert done(*jobs, num_workers=num_workers) == pytest.approx(most)


def test_random_schedules_never_do_more() -> None:
    """Jobs in a random order, each whole and at once on the worker that is free first: what is in time counts."""
    rng = random.Random(0)
    for _ in range(200):
        jobs = [(at := rng.random() * 5, at + rng.random() * 3, rng.random()) for _ in range(rng.randrange(1, 12))]
        num_workers, num_done = rng.randrange(1, 4), 0
        free_s = [0.0] * num_workers
        for from_s, to_s, work_s in rng.sample(jobs, len(jobs)):
            worker = min(range(num_workers), key=lambda each: max(free_s[each], from_s))
            end_s = max(free_s[worker], from_s) + work_s
            if end_s <= to_s:
                free_s[worker] = end_s
                num_done += 1
        assert num_done <= done(*jobs, num_workers=num_workers) + 1e-9


def call(arrival_s: float, names: list[int], prompt_len: int, output_len: int = 1) -> Call:
    return Call(arrival_s, prompt_len, output_len, np.array(names, np.uint64))


def test_a_prompt_needs_what_no_earlier_one_began_with() -> None:
    whole = 2 * BLOCK_TOKENS
    calls = [
        call(2.0, [1, 2, 3], whole + 10),
        call(1.0, [1, 2], whole),
        call(3.0, [1, 2], whole),
        call(4.0, [9, 2], whole),
    ]
    assert new_tokens(calls).tolist() == [10, whole, 1, whole]


def test_work_is_the_sum_of_the_terms_of_steps_that_others_share() -> None:
    model = StepModel(step=8.0, row=0.5, context=0.01, prompt_step=4.0, prompt_token=0.1, prompt_pair=0.001, prompt=2.0)
    worker = WorkerSetup(step_model=model, max_requests=16, max_step_tokens=40)
    prompt_s, read_s, output_s = work([call(0.0, [1], 100, output_len=3)], worker)
    assert prompt_s == pytest.approx([(0.1 + 0.1) * 100 + 0.001 * 5000 + 2.0])
    assert read_s == pytest.approx([2 * 0.5])
    assert output_s == pytest.approx([2 * 0.5 + 0.01 * (101 + 102)])


@pytest.mark.parametrize("policy", ["pair_cost", "adaptive"])
@pytest.mark.parametrize(("name", "rate"), [("chat", 4.0), ("bursty", 30.0)])
def test_no_simulated_platform_exceeds_the_bound(name: str, rate: float, policy: str) -> None:
    calls, slo, worker = generate(name, 24, rate, 3), Slo(0.8, 0.02), WorkerSetup()
    roles = (Role.PREFILL, Role.DECODE) if policy == "pair_cost" else (Role.UNIFIED,) * 2
    setup = Setup(tuple(replace(worker, role=role) for role in roles), policy, slo=slo)
    outcome = simulate(setup, calls)
    bound = fluid(calls, [slo] * len(calls), worker, len(roles))
    assert summary(outcome, slo).good <= bound.most_good <= len(calls)
    assert bound.least_gpu_hours <= outcome.gpu_s / 3600
