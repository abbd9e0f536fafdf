"""Bursts of requests in worlds whose costs are known: who learns them keeps steps as short as who knows them.

A world is what steps take, with noise or without. `Knowing` gives prompts as much of a step as fits by these costs,
`Learning` by what `StepPace` has learned of steps before.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.pace.step_sizes import STEP_S
from diptych.engine.values.prompt_cost import MIN_CHUNK
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

LONGEST_S = 0.1
MOST = 8192
WARM = 8  # steps with prompts beside outputs
STEADY = 24  # steps


@dataclass(frozen=True)
class World:
    """What a step takes. By default an H200 with a model of 8 billion parameters."""

    weights_s: float = 4e-3
    row_s: float = 12e-6
    context_s: float = 3.4e-8
    token_s: float = 24e-6
    prompt_s: float = 2e-3  # of a step that has any: it is launched kernel by kernel
    mixed_row_s: float = 24e-6  # beside prompts
    noise: float = 0.1  # relative

    def seconds(self, cost: int, num_rows: int, context: int) -> float:
        """Return how long a step takes, without noise. While prompts are multiplied, weights are read."""
        if not cost:
            return self.weights_s + self.row_s * num_rows + self.context_s * context
        products_s = self.token_s * cost + self.mixed_row_s * num_rows
        return max(self.weights_s, products_s) + self.context_s * context + self.prompt_s

    def fitting(self, num_rows: int, context: int) -> int:
        """Return what prompts may cost beside so many requests."""
        spare_s = LONGEST_S - self.seconds(1, num_rows, context)
        return min(MOST, max(MIN_CHUNK, num_rows, 1 + int(max(0.0, spare_s) / self.token_s)))


H200 = World()
REAL = {
    "an H200": H200,
    "launches that take long": World(prompt_s=1e-2),
    "rows that are dear beside prompts": World(mixed_row_s=120e-6),
    "contexts that are dear": World(context_s=1e-7),
    "a CPU": World(weights_s=0.03, row_s=1e-4, token_s=1e-3, prompt_s=0.0, mixed_row_s=1e-3),
}
WORLDS = st.builds(
    World,
    weights_s=st.floats(1e-3, 2e-2),
    row_s=st.floats(1e-6, 5e-5),
    context_s=st.floats(0, 1e-7),
    token_s=st.floats(3e-6, 3e-4),
    prompt_s=st.floats(0, 2e-2),
    mixed_row_s=st.floats(0, 1e-4),
    noise=st.sampled_from([0.0, 0.03, 0.1]),
)


class Planner(Protocol):
    """Says how much of prompts a step has, and hears of steps."""

    def budget(self, num_rows: int, context: int, now_s: float) -> int: ...
    def begin(self, cost: int, now_s: float, num_rows: int, joining: list[Request]) -> None: ...
    def end(self, now_s: float) -> None: ...
    def leave(self, request: Request) -> None: ...


@dataclass(frozen=True)
class Knowing:
    world: World

    def budget(self, num_rows: int, context: int, now_s: float) -> int:
        return self.world.fitting(num_rows, context) if num_rows else MOST

    def begin(self, cost: int, now_s: float, num_rows: int, joining: list[Request]) -> None: ...
    def end(self, now_s: float) -> None: ...
    def leave(self, request: Request) -> None: ...


@dataclass(frozen=True)
class Learning:
    pace: StepPace = field(default_factory=lambda: StepPace(LONGEST_S))

    def budget(self, num_rows: int, context: int, now_s: float) -> int:
        return self.pace.beside(MOST, num_rows, now_s)

    def begin(self, cost: int, now_s: float, num_rows: int, joining: list[Request]) -> None:
        self.pace.begin(cost, now_s, num_rows, joining)

    def end(self, now_s: float) -> None:
        self.pace.end(now_s)

    def leave(self, request: Request) -> None:
        self.pace.leave(request)


class Step(NamedTuple):
    cost: int
    num_rows: int
    usual_s: float  # without noise, and in the mean where long and short steps alternate


@dataclass
class Burst:
    """Requests that all come at once, served step by step; each step is planned while the one before it runs.

    Of some steps with many prompts the end is heard of late: when the next one is nearly over. Behind the first
    `STEADY` steps, long and short ones alternate: they take so many times as long.
    """

    world: World
    planner: Planner
    requests: list[tuple[Request, int]]  # that wait, the last one first; what is left of their prompts
    rng: random.Random
    late: float = 0.0  # how many of them
    factors: tuple[float, float] = (1.0, 1.0)
    now_s: float = 0.0  # as the planner hears of it
    ended_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    num_tokens: int = 0
    _running: list[tuple[int, int, Request]] = field(default_factory=list)  # by the step of their last token
    _context: int = 0
    _flying_s: float | None = None

    def serve(self) -> Burst:
        joining: list[Request] = []
        while self.requests or self._running or joining:
            num_rows = self._join(joining)
            cost, joining = self._prompts(num_rows)
            self._launch(cost, num_rows, joining)
            self.num_tokens += num_rows + len(joining)
            self._context += num_rows
            self._leave()
        self._land()
        return self

    def _join(self, joining: list[Request]) -> int:
        for request in joining:
            end = len(self.steps) + request.params.max_tokens - 1
            heapq.heappush(self._running, (end, request.room, request))
            self._context += request.num_tokens
        return len(self._running)

    def _prompts(self, num_rows: int) -> tuple[int, list[Request]]:
        """Return the cost of the prompts of the next step, and those that are complete with it."""
        budget, cost, complete = self.planner.budget(num_rows, self._context, self.now_s), 0, []
        while self.requests and cost < budget:
            request, left = self.requests.pop()
            taken = min(left, budget - cost)
            cost += taken
            if taken < left:
                self.requests.append((request, left - taken))
            else:
                complete.append(request)
        return cost, complete

    def _launch(self, cost: int, num_rows: int, joining: list[Request]) -> None:
        self.planner.begin(cost, self.now_s, num_rows, joining)
        number, factors = len(self.steps), self.factors
        mean, factor = (sum(factors) / 2, factors[number % 2]) if number >= STEADY else (1.0, 1.0)
        seconds = self.world.seconds(cost, num_rows, self._context)
        self.steps.append(Step(cost, num_rows, mean * seconds))
        self._land()
        self._flying_s = factor * seconds * math.exp(self.rng.gauss(0, self.world.noise))

    def _land(self) -> None:
        """End the step before the one that is launched."""
        if self._flying_s is not None:
            self.ended_s += self._flying_s
            newest, is_late = self.steps[-1], self.rng.random() < self.late
            heard_s = self.ended_s + (0.9 * newest.usual_s if is_late and newest.cost > MOST // 8 else 0.0)
            self.now_s = max(self.now_s + 1e-3, heard_s)
            self.planner.end(self.now_s)

    def _leave(self) -> None:
        while self._running and self._running[0][0] <= len(self.steps):
            _, _, request = heapq.heappop(self._running)
            self._context -= request.num_tokens + request.params.max_tokens - 1
            self.planner.leave(request)


def new_burst(world: World, planner: Planner, seed: int, late: float = 0.0, num_requests: int = 256) -> Burst:
    rng, requests = random.Random(seed), []
    for room in range(1, num_requests + 1):
        prompt, params = np.zeros(rng.randint(64, 512), np.int64), SamplingParams(max_tokens=rng.randint(32, 96))
        requests.append((new_request(room, prompt, params), len(prompt)))
    return Burst(world, planner, requests, rng, late)


def burst(world: World, planner: Planner, seed: int, late: float = 0.0) -> Burst:
    return new_burst(world, planner, seed, late).serve()


def longest_s(served: Burst) -> float:
    """Return the longest step that had more prompts than it must have, once some had run, by its usual time."""
    mixed = [step for step in served.steps if step.cost and step.num_rows][WARM:]
    return max((step.usual_s for step in mixed if step.cost > max(MIN_CHUNK, step.num_rows)), default=0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", REAL.values(), ids=REAL)
def test_who_learns_what_steps_cost_serves_as_fast_as_who_knows_it_in_steps_as_short(world: World, seed: int) -> None:
    known, learned = burst(world, Knowing(world), seed), burst(world, Learning(), seed)
    assert learned.num_tokens == known.num_tokens
    assert learned.ended_s <= known.ended_s * 1.02
    assert longest_s(learned) <= LONGEST_S * 1.3


@pytest.mark.parametrize("seed", range(3))
def test_steps_whose_end_is_heard_of_late_make_none_longer(seed: int) -> None:
    known, learned = burst(H200, Knowing(H200), seed), burst(H200, Learning(), seed, late=0.2)
    assert learned.ended_s <= known.ended_s * 1.02
    assert longest_s(learned) <= LONGEST_S * 1.3


@pytest.mark.parametrize("factors", [(1.9, 0.76), (1.9, 0.8), (2.2, 0.7), (0.5, 4.5)])
def test_where_long_and_short_steps_alternate_both_together_take_as_long_as_two_may(
    factors: tuple[float, float],
) -> None:
    alternating = new_burst(World(noise=0.02), Learning(), 0, num_requests=768)
    alternating.factors = factors
    mixed = [step.usual_s for step in alternating.serve().steps[STEADY + WARM :] if step.cost and step.num_rows][:-1]
    assert sum(mixed) / len(mixed) == pytest.approx(LONGEST_S, rel=0.15)
    assert mixed[-12:-2] == pytest.approx([LONGEST_S] * 10, rel=0.1)


@settings(max_examples=20)
@given(WORLDS, st.integers(0, 1 << 20))
@example(World(noise=0.0), 0)
@example(World(1e-3, 1e-6, 0.0, 3e-6, 0.0, 1e-4, 0.03), 1)  # 256 prompts take 0.4 s
def test_no_step_takes_longer_than_it_may_by_more_than_noise_whatever_steps_cost(world: World, seed: int) -> None:
    known, learned = burst(world, Knowing(world), seed), burst(world, Learning(), seed)
    assert learned.ended_s <= known.ended_s * 1.04 + world.seconds(1, 0, 0)  # one small step more, at first
    assert longest_s(learned) <= LONGEST_S * (1.1 + 3 * world.noise)


@pytest.mark.parametrize("world", REAL.values(), ids=REAL)
def test_the_first_steps_beside_outputs_are_bounded_before_any_was_measured(world: World) -> None:
    served = burst(world, Learning(), 0)
    first = next(step for step in served.steps if step.num_rows)
    assert first.cost <= MOST * LONGEST_S / STEP_S
