"""Random workloads, by seed: whatever comes, every request is answered once, rightly, and nothing is left behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import expected_output

from diptych.engine.schedule.policies import POLICIES
from diptych.engine.values.limits import Scheduling
from diptych.generation.output import FailureCode, Output

VOCAB = 1000
NUM_REQUESTS = 2000 if os.environ.get("DIPTYCH_DEEP_CHECKS") else 700
TENANTS = ("", "a", "b", "c")

Engine = Any  # the fixture's class: test helpers can't be imported
NewEngine = Callable[..., Engine]


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    prompt: list[int]
    max_tokens: int


def play(engine: Engine, rng: random.Random, num_requests: int, *, check_every: int) -> dict[int, Asked]:
    """Feed the engine, a few requests and then a few steps at a time, and abort some; time passes with the steps."""
    asked: dict[int, Asked] = {}
    while len(asked) < num_requests:
        for _ in range(rng.randrange(8)):
            room = len(asked) + 1
            shared = [7] * rng.choice([0, 0, 8, 20])
            prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))]
            asked[room] = Asked(prompt, rng.choice([1, 2, 3, 5, 8, 30]))
            deadline_s = engine.now_s + rng.choice([0.2, 5.0]) if rng.random() < 0.1 else None
            priority, tenant = rng.randrange(-2, 3), rng.choice(TENANTS)
            engine.start(room, prompt, asked[room].max_tokens, priority=priority, tenant=tenant, deadline_s=deadline_s)
            if rng.random() < 0.1:
                engine.abort(rng.randrange(1, room + 1))
        for _ in range(rng.randrange(20)):
            engine.now_s += 0.01
            engine.step(check=engine.num_steps % check_every == 0)
    engine.run()
    return asked


def verify(asked: dict[int, Asked], outputs: dict[int, list[Output]], allowed: set[FailureCode]) -> None:
    for room, request in asked.items():
        *before, last = outputs[room]
        assert not any(output.finish or output.failure for output in before)
        assert (last.finish is None) != (last.failure is None)
        tokens = [token for output in outputs[room] for token in output.token_ids]
        if last.failure is None:
            assert tokens == expected_output(request.prompt, request.max_tokens, VOCAB)
        else:
            assert last.failure.code in allowed
            assert tokens == expected_output(request.prompt, len(tokens), VOCAB)


def play_many(new_engine: NewEngine, overlap: bool) -> list[Any]:
    scheduling = Scheduling("priority", max_waiting=200, tenant_weights={"a": 3.0})
    engine = new_engine(40, 32, 8, scheduling, overlap=overlap)
    asked = play(engine, random.Random(1), NUM_REQUESTS, check_every=100)
    verify(asked, engine.outputs, {FailureCode.ABORTED, FailureCode.DEADLINE, FailureCode.OVERLOADED})
    assert engine.core.report().counts.retractions > 0
    return [(room, engine.outputs[room]) for room in asked]


def test_many_requests_are_all_answered_and_the_same_seed_gives_the_same(new_engine: NewEngine) -> None:
    assert play_many(new_engine, False) == play_many(new_engine, False)


def test_many_requests_are_all_answered_with_overlapped_steps(new_engine: NewEngine) -> None:
    play_many(new_engine, True)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(sorted(POLICIES)),
    num_pages=st.integers(20, 60),
    max_step_tokens=st.integers(1, 40),
    max_requests=st.integers(1, 8),
    overlap=st.booleans(),
)
def test_any_workload_under_any_policy_is_answered_and_leaks_nothing(
    engine_class: type[Engine],
    seed: int,
    policy: str,
    num_pages: int,
    max_step_tokens: int,
    max_requests: int,
    overlap: bool,
) -> None:
    scheduling = Scheduling(policy, tenant_weights={"a": 3.0})
    engine = engine_class(num_pages, max_step_tokens, max_requests, scheduling, overlap=overlap)
    try:
        asked = play(engine, random.Random(seed), 40, check_every=1)
        verify(asked, engine.outputs, {FailureCode.ABORTED, FailureCode.DEADLINE, FailureCode.INVALID})
    finally:
        engine.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_old_request_is_answered_while_better_ones_keep_coming(new_engine: NewEngine, policy: str) -> None:
    """The pool holds two at a time; every step brings requests of a higher priority, a cached prompt, a deadline."""
    engine = new_engine(24, 16, 2, Scheduling(policy))
    engine.start(1, list(range(40)), 4, priority=-1, tenant="a")
    room = 1
    while not engine.outputs[1] or engine.outputs[1][-1].finish is None:
        for tenant in ("a", "b"):
            room += 1
            engine.start(room, [7] * 20, 4, priority=2, tenant=tenant, deadline_s=engine.now_s + 90.0)
        engine.step(check=False)
        engine.now_s += 0.25
        assert engine.now_s < 900, "starved"
    for waiting in range(2, room + 1):
        engine.abort(waiting)
