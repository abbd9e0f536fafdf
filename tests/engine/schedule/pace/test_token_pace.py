"""What prompts may cost beside requests that have a time per token: no token is late, and no prompt waits for ever."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from diptych.engine.schedule.kv_forecast import OutputLengths
from diptych.engine.schedule.pace.prompts import PATIENCE, NextPrompt
from diptych.engine.schedule.pace.step_pace import AT_LAST, UNBOUNDED, StepPace
from diptych.engine.schedule.pace.token_deadlines import FORGIVEN, TokenDeadlines, grouped
from diptych.engine.values.prompt_cost import MIN_CHUNK
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo

MOST = 1 << 20
STEP_S, TOKEN_S, CONTEXT_S = 0.004, 25e-6, 0.034e-6
NOISE = 0.03  # of how long a step takes


def running(room: int, tpot_s: float, prompt_len: int = 1000) -> Request:
    return new_request(room, np.zeros(prompt_len, np.int64), SamplingParams(max_tokens=2000), slo=Slo(0.0, tpot_s))


@dataclass(frozen=True)
class Floor:
    """What a step with tokens and prompts takes at least."""

    extra_s: float = 0.0  # beside a step without prompts: its kernels are more
    host_s: float = 0.0  # in all: the host launches them one by one

    def whole(self, plain_s: float) -> float:
        return max(plain_s + self.extra_s, self.host_s)


@dataclass
class Worker:
    """Runs steps on a clock, as an H200 would; `overlapped`: each is planned while the one before it runs."""

    pace: StepPace = field(default_factory=lambda: StepPace(math.inf))
    overlapped: bool = False
    noise: random.Random | None = None
    floor: Floor = Floor()
    now_s: float = 0.0
    firsts: dict[int, float] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)  # after the first
    latest_s: float = -math.inf  # by how much the latest token was late
    _flying: list[tuple[float, Sequence[int]]] = field(default_factory=list)  # when they take so long, for whom

    def join(self, request: Request) -> None:
        """Between steps: what is launched before it came may take long."""
        while self._flying:
            self._land()
        self.requests[request.room], self.firsts[request.room], self.tokens[request.room] = request, self.now_s, 0
        self.pace.join(request, self.now_s)

    def leave(self, room: int) -> None:
        self.pace.leave(self.requests.pop(room))

    def step(self, wanted: int, *, apart: bool = False) -> int:
        """Launch a step; return how many tokens of prompts it has: None of either kind where there is nothing to do."""
        rows = [] if apart else list(self.requests)
        num_rows, now_s = len(self.requests), self.now_s
        budget = self.pace.apart(MOST, num_rows, now_s, wanted) if apart else self.pace.beside(MOST, num_rows, now_s)
        cost = min(wanted, budget) if wanted else 0
        if not cost and not rows:
            return 0
        context = sum(self.requests[room].num_tokens + self.tokens[room] for room in rows)
        took_s = max(STEP_S, TOKEN_S * (cost + len(rows))) + CONTEXT_S * context
        if cost and rows:
            took_s = max(took_s, self.floor.whole(STEP_S + CONTEXT_S * context))
        if self.noise is not None:
            took_s *= self.noise.uniform(1 - NOISE, 1 + NOISE)
        self.pace.begin(cost, self.now_s, len(rows))
        self._flying.append((took_s, rows))
        if not self.overlapped or len(self._flying) > 1:
            self._land()
        return cost

    def _land(self) -> None:
        took_s, rows = self._flying.pop(0)
        self.now_s += took_s
        self.pace.end(self.now_s)
        for room in rows:
            if room in self.requests and self.requests[room].slo.tpot_s:
                self.tokens[room] += 1
                due_s = self.firsts[room] + self.tokens[room] * self.requests[room].slo.tpot_s
                self.latest_s = max(self.latest_s, self.now_s - due_s)


def warm(worker: Worker) -> None:
    """Let it learn how long steps take."""
    worker.join(running(10_000, 0.0))
    for cost in (16, 500, 1000, 4000, 8000, 0, 0, 0):
        worker.step(cost)
        worker.step(cost, apart=True)
    worker.leave(10_000)


def outputs_of(num_tokens: int) -> OutputLengths:
    """What is known when many outputs had so many tokens."""
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(num_tokens)
    return lengths


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_late_and_prompts_go_on_wherever_there_is_slack(seed: int, overlapped: bool) -> None:
    rng = random.Random(seed)
    worker = Worker(overlapped=overlapped, noise=random.Random(seed + 100))
    warm(worker)
    computed = 0
    for number in range(3000):
        if rng.random() < 0.03:
            worker.join(running(number, rng.choice((0.0101, 0.025, 0.1)), rng.randrange(100, 4000)))
        if worker.requests and rng.random() < 0.02:
            worker.leave(rng.choice(list(worker.requests)))
        if len(worker.requests) > 20:
            worker.leave(next(iter(worker.requests)))
        computed += worker.step(rng.choice((0, 500, 8192)))
    assert worker.latest_s <= NOISE * 0.0101, "steps differ by so much from what was expected"
    assert computed / worker.now_s > 0.25 / TOKEN_S


FLOORS = {
    "none": Floor(),
    "1.1 ms more": Floor(1.1e-3),
    "4 ms more": Floor(4e-3),
    "6 ms more": Floor(6e-3),
    "10 ms": Floor(host_s=0.010),
    "13 ms": Floor(host_s=0.013),
    "1.1 ms more, and 10 ms": Floor(1.1e-3, 0.010),
}


def learned(floor: Floor) -> Worker:
    """It has computed prompts of all sizes, small ones as well, and makes 20 outputs of 10 ms a token."""
    worker = Worker(noise=random.Random(3), floor=floor)
    warm(worker)
    worker.join(running(10_001, 0.0))
    for cost in (64, 32, 200, 400, 128, 0, 50, 700) * 8:
        worker.step(cost)
    worker.leave(10_001)
    for room in range(20):
        worker.join(running(room, 0.010, 2000))
    return worker


def tokens_a_step(floor: Floor, plain_s: float) -> float:
    """Return how many tokens of prompts there is time for beside each token, if no step with both has too few."""
    left_s, floor_s = 0.010 - plain_s, floor.whole(plain_s) - plain_s
    if left_s >= floor_s:
        return (STEP_S + left_s) / TOKEN_S
    return left_s / floor_s * (STEP_S + floor_s) / TOKEN_S


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
def test_slack_is_saved_until_prompts_are_worth_what_a_step_with_both_takes_at_least(floor: Floor) -> None:
    worker = learned(floor)
    for _ in range(50):
        worker.step(MOST)
    worker.latest_s, costs = -math.inf, [worker.step(MOST) for _ in range(600)]
    plain_s = STEP_S + CONTEXT_S * sum(2000 + worker.tokens[room] - 300 for room in worker.requests)
    assert sum(costs) >= 0.65 * 600 * tokens_a_step(floor, plain_s)
    assert worker.latest_s <= NOISE * 0.013, "steps differ by so much from what was expected"


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
def test_nobody_starves_where_a_step_with_both_takes_more_than_is_ever_left(floor: Floor) -> None:
    worker = Worker(noise=random.Random(3), floor=floor)
    warm(worker)
    worker.join(running(1, STEP_S * 1.03))
    costs = [worker.step(MOST) for _ in range(400)]
    waits = [len(each) for each in "".join("x" if cost else "-" for cost in costs).split("x")]
    assert max(waits) < PATIENCE
    assert sum(costs) >= 0.95 * 400 * AT_LAST / PATIENCE


@pytest.mark.parametrize("tpot_s", [0.0, 0.2])
@pytest.mark.parametrize("extra_s", [0.08, 0.11])
def test_steps_that_are_too_long_however_few_prompts_they_have_are_not_many(extra_s: float, tpot_s: float) -> None:
    worker = Worker(StepPace(0.1), noise=random.Random(3), floor=Floor(extra_s))
    warm(worker)
    worker.join(running(1, tpot_s))
    for cost in (50, 120, 0, 0, 300, 700, 0, 1500, 4000) * 20:
        worker.step(cost)
    left, num_steps = 16_000, 0
    while left > 0:
        left, num_steps = left - worker.step(left), num_steps + 1
        assert num_steps < 100


def test_a_few_tokens_take_no_less_than_a_step_with_both_does_and_say_nothing_of_more() -> None:
    worker = learned(Floor(6e-3))
    for _ in range(200):
        worker.step(24)
    assert worker.pace.step_parts_s[2] == pytest.approx(TOKEN_S, rel=0.1)


def test_prompts_in_steps_of_their_own_make_no_token_late() -> None:
    worker = Worker()
    warm(worker)
    for room in range(8):
        worker.join(running(room, 0.012))
    computed = 0
    for _ in range(1500):
        computed += worker.step(MOST, apart=True)
        worker.step(0)
    assert worker.latest_s <= 0.0
    assert computed / worker.now_s > 0.25 / TOKEN_S


def test_slack_that_was_earned_is_spent_at_once() -> None:
    worker = Worker()
    warm(worker)
    worker.join(running(1, 0.05))
    for _ in range(100):
        worker.step(0)
    spent = sum(worker.step(MOST) for _ in range(3))
    assert spent * TOKEN_S > 0.7 * (100 * 0.046)
    assert worker.latest_s <= 0.0


def test_without_requests_that_decode_nothing_bounds_a_step() -> None:
    worker = Worker()
    warm(worker)
    assert worker.pace.beside(MOST, 0, 1.0) == worker.pace.apart(MOST, 0, 1.0, MOST) == MOST
    assert worker.pace.shown(0) == UNBOUNDED


def test_prompts_do_not_starve_where_there_is_no_slack() -> None:
    """A step without prompts takes nearly all of the time per token."""
    worker = Worker()
    warm(worker)
    worker.join(running(1, STEP_S * 1.03))
    waits, waited = [], 0
    for _ in range(400):
        cost = worker.step(MOST, apart=True)
        worker.step(0)
        if cost:
            waits.append(waited)
            waited = 0
            assert cost >= AT_LAST
        else:
            waited += 1
    assert max(waits) < PATIENCE
    assert len(waits) >= 400 // PATIENCE


def test_beside_tokens_prompts_have_what_is_computed_while_weights_are_read() -> None:
    worker = Worker()
    warm(worker)
    worker.join(running(1, STEP_S * 1.03))
    costs = [worker.step(MOST) for _ in range(400)]
    assert worker.latest_s <= 0.0
    assert sum(costs) * TOKEN_S > 0.8 * 400 * STEP_S


def test_a_few_free_tokens_do_not_make_long_prompts_look_cheap() -> None:
    worker = Worker()
    warm(worker)
    worker.join(running(1, 0.0045))
    for _ in range(300):
        assert worker.step(MOST) * TOKEN_S < 0.005, "they take no longer than the step, or hardly"
    assert worker.pace.step_parts_s[2] == pytest.approx(TOKEN_S, rel=0.1)


def test_who_waited_for_a_step_of_its_own_and_left_holds_up_no_prompts_beside_outputs() -> None:
    def beside(is_refused: bool) -> int:
        worker = Worker()
        warm(worker)
        worker.join(running(1, STEP_S * 1.03))
        if is_refused:
            assert worker.step(MOST, apart=True) == 0
        worker.step(0)
        worker.leave(1)
        worker.join(running(2, 0.1))
        for _ in range(20):
            worker.step(0)
        return worker.pace.beside(MOST, 1, worker.now_s)

    assert beside(True) == beside(False)


def test_a_long_prompt_behind_short_ones_does_not_wait_where_there_is_time() -> None:
    worker = Worker()
    for _ in range(20):
        worker.step(50, apart=True)
    worker.join(running(1, 1.0))
    for _ in range(20):
        worker.step(0)
    assert worker.step(2000, apart=True) > 0


def test_a_time_per_token_that_no_step_keeps_binds_nobody_but_the_longest_step_does() -> None:
    worker = Worker(StepPace(0.1))
    warm(worker)
    worker.join(running(1, 0.001))
    costs = [worker.step(MOST) for _ in range(20)]
    assert min(costs) * TOKEN_S > 0.06
    assert worker.latest_s > 0.0


def test_those_without_a_time_per_token_and_those_with_one_bound_a_step_both() -> None:
    worker = Worker(StepPace(0.02))
    warm(worker)
    worker.join(running(1, 0.0))
    worker.join(running(2, 1.0))
    assert 0.01 < worker.step(MOST) * TOKEN_S <= 0.02
    worker.leave(1)
    assert 0.01 < worker.step(MOST) * TOKEN_S <= 0.02, "who comes meanwhile waits for the step"
    assert worker.pace.shown(1) * TOKEN_S > 0.03, "but there is more slack than that"


def test_what_is_shown_follows_the_slack() -> None:
    worker = Worker()
    warm(worker)
    worker.join(running(1, 0.010))
    worker.step(0)
    first = worker.pace.shown(1)
    for _ in range(50):
        worker.step(0)
    assert MIN_CHUNK < first < 600 < worker.pace.shown(1)
    base_s, slope_s, prompt_s = worker.pace.step_parts_s
    assert base_s == pytest.approx(STEP_S, rel=0.15)
    assert 0 < slope_s < 1e-6
    assert prompt_s == pytest.approx(TOKEN_S, rel=0.25)


def test_young_outputs_may_be_late_as_long_as_they_can_catch_up() -> None:
    worker = Worker()
    warm(worker)
    worker.pace.expect(lengths := outputs_of(60))
    worker.join(running(1, 0.010))
    spent = worker.step(MOST)
    assert spent * TOKEN_S > 0.7 * lengths.short * (0.010 - 1.1 * STEP_S)
    assert worker.latest_s > 0.0
    for _ in range(lengths.short - 1):
        worker.step(MOST)
    worker.latest_s = -math.inf
    for _ in range(200):
        worker.step(MOST)
    assert worker.latest_s <= 0.0


def test_a_request_that_may_not_have_so_many_tokens_borrows_none() -> None:
    worker = Worker()
    warm(worker)
    worker.pace.expect(lengths := outputs_of(60))
    short = running(1, 0.010)
    short.max_len = short.num_tokens + lengths.short - 10
    worker.join(short)
    for _ in range(lengths.short - 10):
        worker.step(MOST)
    assert worker.latest_s <= 0.0


@pytest.mark.parametrize("lengths", [(5,) * 30, (5,) * 10, tuple(range(100, 200))])
def test_what_is_short_for_an_output_is_learned_from_those_that_ended(lengths: Sequence[int]) -> None:
    known = OutputLengths()
    for length in lengths:
        known.observe(length)
    shorter = sum(length < known.short for length in lengths)
    assert known.short == 0 if len(lengths) < 20 else shorter <= 0.05 * len(lengths) + 1 and known.short > 3


def waiting(num_tokens: int, due_s: float, *, weight: float = 1.0, queued: int = 0, num_waiting: int = 1) -> NextPrompt:
    return NextPrompt(99, due_s, num_tokens, weight, max(queued, num_tokens), num_waiting, (False, 0.0))


def busy(num_outputs: int, made: int, tpot_s: float = 0.010) -> Worker:
    """It has made so much of outputs of a thousand tokens each, and what they were ahead is spent."""
    worker = Worker()
    warm(worker)
    worker.pace.expect(outputs_of(1000))
    for room in range(num_outputs):
        worker.join(running(room, tpot_s))
    for _ in range(made):
        worker.step(MOST)
    return worker


@pytest.mark.parametrize("apart", [False, True])
def test_a_prompt_that_would_be_late_goes_first_where_outputs_catch_up_behind_it(apart: bool) -> None:
    worker = busy(10, 300)
    budget = partial(worker.pace.apart, wanted=4000) if apart else worker.pace.beside
    now_s = worker.now_s
    assert budget(MOST, 10, now_s) < 500
    assert budget(MOST, 10, now_s, first=waiting(4000, now_s + 0.15)) >= 4000, "a tenth of a second in all"
    assert budget(MOST, 10, now_s, first=waiting(500, now_s + 0.11)) >= 4000, "it was chosen, and goes on"


@pytest.mark.parametrize(
    "first",
    [waiting(4000, 0.05), waiting(4000, 5.0), waiting(4000, math.inf)],
    ids=["late in any case", "in time in any case", "nobody said when"],
)
def test_no_prompt_goes_first_for_nothing(first: NextPrompt) -> None:
    worker = busy(10, 300)
    first = first._replace(due_s=worker.now_s + first.due_s)
    assert worker.pace.beside(MOST, 10, worker.now_s, first) == worker.pace.beside(MOST, 10, worker.now_s)


def test_a_prompt_goes_first_for_those_behind_it() -> None:
    worker = busy(10, 300)
    first = waiting(4000, worker.now_s + 1.0)
    assert worker.pace.beside(MOST, 10, worker.now_s, first) < 4000
    assert worker.pace.beside(MOST, 10, worker.now_s, first._replace(queued=40_000)) >= 4000


def test_no_prompt_goes_first_at_the_cost_of_more_outputs_than_it_weighs() -> None:
    worker = busy(10, 990)
    first = waiting(4000, worker.now_s + 0.15)
    assert worker.pace.beside(MOST, 10, worker.now_s, first) < 4000, "they would end before they have caught up"
    assert worker.pace.beside(MOST, 10, worker.now_s, first._replace(weight=20.0)) >= 4000


def test_few_outputs_do_not_hold_up_many_prompts() -> None:
    worker = busy(2, 990)
    first = waiting(4000, worker.now_s + 0.5, queued=20_000)
    assert worker.pace.beside(MOST, 2, worker.now_s, first) < 4000
    assert worker.pace.beside(MOST, 2, worker.now_s, first._replace(num_waiting=5)) >= 4000


def test_outputs_that_are_late_in_any_case_are_not_lost_once_more() -> None:
    deadlines = TokenDeadlines()
    deadlines.expect(outputs_of(1000))
    for room in range(10):
        deadlines.add(running(room, 0.010), 0.0)
    deadlines.stepped(300)
    before = deadlines.lost(3.0, 0.1, STEP_S, pace_s=0.0099)
    assert deadlines.next_due_s(60.0, STEP_S) > 60.0, "a minute passes without a token"
    assert deadlines.lost(60.0, 0.1, STEP_S, pace_s=0.0099) == 0.0 < before


def test_what_is_lost_does_not_depend_on_who_asked_before() -> None:
    """What is kept from one question to the next is made anew whenever somebody joins or leaves."""
    rng = random.Random(0)
    asked, unasked = TokenDeadlines(), TokenDeadlines()
    rooms: dict[int, Request] = {}
    most = 0.0
    for deadlines in (asked, unasked):
        deadlines.expect(outputs_of(200))
    for now in range(600):
        if rng.random() < 0.1:
            rooms[now] = request = running(now, rng.choice([0.010, 0.010, 0.020]))
            for deadlines in (asked, unasked):
                deadlines.add(request, now / 100)
        if rooms and rng.random() < 0.05:
            leaving = rooms.pop(rng.choice(list(rooms)))
            for deadlines in (asked, unasked):
                deadlines.remove(leaving)
        if rooms and rng.random() < 0.1:
            request, num_more = rng.choice(list(rooms.values())), rng.randrange(1, 4)
            for deadlines in (asked, unasked):
                deadlines.ahead(request, num_more)
        dues = [deadlines.next_due_s(now / 100, STEP_S) for deadlines in (asked, unasked)]
        assert dues[0] == dues[1]
        num_steps = int(rng.random() < 0.5)
        for deadlines in (asked, unasked):
            deadlines.stepped(num_steps)
        found = asked.lost(now / 100, 0.05, STEP_S, pace_s=0.008)
        if now % 50 == 49:
            assert found == unasked.lost(now / 100, 0.05, STEP_S, pace_s=0.008)
            unasked = copy.deepcopy(asked)
            most = max(most, found)
    assert most > 0


def test_how_soon_outputs_end_follows_those_that_became_as_long() -> None:
    made, more = np.array([0.0, 0.0, 900.0, 900.0, 990.0]), np.array([10.0, 900.0, 10.0, 300.0, 10.0])
    lengths, limit = outputs_of(1000), np.full(5, 1000.0)
    soon = lengths.ends_within(made, more, limit)
    assert soon[0] < 0.01
    assert soon[1] < 0.5
    assert soon[2] < soon[3] == soon[4] == 1.0, "none may have more than a thousand"
    unknown = OutputLengths().ends_within(np.array([0.0, 1000.0]), np.array([128.0, 128.0]), np.full(2, math.inf))
    assert unknown == pytest.approx([0.5, 128 / 1128])


def test_deadlines_are_those_of_every_request_one_by_one() -> None:
    rng = random.Random(5)
    deadlines, due, tpots = TokenDeadlines(), dict[int, float](), dict[int, float]()
    requests = dict[int, Request]()
    for number in range(600):
        now_s = number * 0.01
        if rng.random() < 0.3:
            request = running(number, rng.choice((0.02, 0.03, 0.3)))
            requests[number], tpots[number] = request, grouped(request.slo.tpot_s)
            deadlines.add(request, now_s)
            due[number] = now_s + tpots[number]
        if requests and rng.random() < 0.25:
            gone = rng.choice(list(requests))
            deadlines.remove(requests.pop(gone))
            del due[gone]
        if requests and rng.random() < 0.1:
            lucky = rng.choice(list(requests))
            deadlines.ahead(requests[lucky], 3)
            due[lucky] += 3 * tpots[lucky]
        for room, at_s in due.items():  # who is too late to be mended
            due[room] = now_s + tpots[room] if at_s < now_s - FORGIVEN * tpots[room] else at_s
        assert deadlines.next_due_s(now_s, 0.0) == pytest.approx(min(due.values(), default=math.inf))
        deadlines.stepped(1)
        due = {room: at_s + tpots[room] for room, at_s in due.items()}


def test_a_request_is_held_to_a_little_less_than_it_has() -> None:
    for tpot_s in (0.001, 0.0101, 0.025, 0.3, 7.0):
        assert 0.979 * tpot_s <= grouped(tpot_s) <= 0.99 * tpot_s


def test_prompts_get_the_least_that_they_must_have_in_steps_that_last_no_longer_than_they_may() -> None:
    """A millisecond a token, and an output that is late."""
    for longest_s, least in ((math.inf, AT_LAST), (0.05, 50)):
        pace = StepPace(longest_s)
        pace.begin(1000, 0.0)
        pace.end(1.0)
        pace.join(running(1, 0.02), 1.0)
        assert pace.apart(MOST, 1, 1.1, MOST) == 0
        assert pace.apart(MOST, 1, 1.1, MOST, least=AT_LAST) == least
