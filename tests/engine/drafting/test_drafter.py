"""What is drafted, told by a world in which steps take what a table says and tokens come as a text says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from diptych.engine.drafting.drafter import SourceDrafter
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.record import RequestRecords
from diptych.engine.drafting.source import NO_GUESS, DraftSource, Guess
from diptych.engine.drafting.step_costs import KNOWN
from diptych.engine.drafting.step_timer import Launched, StepTimer
from diptych.engine.values.core_report import SourceCounts
from diptych.engine.values.limits import MAX_ROW_DRAFTS
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Chunk, Step, new_step
from diptych.generation.request_groups import Hints
from diptych.generation.sampling_params import SamplingParams

PROMPT_LEN = 4
NumTokens = int
Cost = Callable[[NumTokens], float]


def cpu(num_tokens: NumTokens) -> float:
    """Return what a small model takes on a CPU: rows cost a tenth of a step."""
    return 0.070 + 0.007 * num_tokens


def dear(num_tokens: NumTokens) -> float:
    return 0.010 * num_tokens


class Oracle:
    """Knows texts, and guesses right as often as `is_right` says; says of each token that it is as likely as `said`."""

    nbytes = 100

    def __init__(self, texts: Mapping[int, Sequence[int]], is_right: Callable[[int], bool], said: float) -> None:
        self._texts = texts
        self._is_right = is_right
        self._said = said
        self.num_asked = 0
        self.ended: list[int] = []

    def guess(self, request: Request, at_most: int) -> Guess:
        self.num_asked += 1
        start = request.num_output_tokens
        text = self._texts[request.room][start : start + at_most]
        wrong = next((at for at in range(len(text)) if not self._is_right(start + at)), None)
        token_ids = tuple(token if at != wrong else token + 1 for at, token in enumerate(text))
        return Guess(token_ids, tuple(self._said ** (at + 1) for at in range(len(token_ids))))

    def end(self, request: Request) -> None:
        self.ended.append(request.room)


class World:
    """Steps a drafter as `Running` does. `now_s` is what all steps took, and asking."""

    def __init__(
        self, texts: Mapping[int, Sequence[int]], source: DraftSource | None, cost: Cost, asking_s: float = 0.0
    ) -> None:
        self._texts = texts
        self._cost = cost
        self._asking_s = asking_s
        self._source = source
        self.now_s = 0.0
        self.drafter = SourceDrafter({"suffix": self}, self._clock, 256)
        self.requests = [self.request(room) for room in texts]
        self.num_steps = 0
        self.num_drafted: list[int] = []  # in each step

    def _clock(self) -> float:
        return self.now_s

    @property
    def nbytes(self) -> int:
        return 0

    def guess(self, request: Request, at_most: int) -> Guess:
        self.now_s += self._asking_s
        return NO_GUESS if self._source is None else self._source.guess(request, at_most)

    def end(self, request: Request) -> None:
        if self._source is not None:
            self._source.end(request)

    def request(self, room: int, speculate: str = "") -> Request:
        params = SamplingParams(max_tokens=len(self._texts[room]))
        request = new_request(room, np.arange(PROMPT_LEN), params, hints=Hints(speculate=speculate))
        request.append(self._texts[room][0])
        request.computed_len = PROMPT_LEN
        return request

    def step(self) -> None:
        began_s = self.now_s
        running = [request for request in self.requests if not request.is_full]
        drafts = dict(self.drafter.propose(running))
        num_tokens = len(running) + sum(map(len, drafts.values()))
        self.num_drafted.append(num_tokens - len(running))
        step = new_step(running, [], drafts)
        self.drafter.launched(step, began_s)
        step.launch()
        self.now_s += self._cost(num_tokens)
        self.drafter.committed(self.now_s)
        for request in running:
            self._commit(request, drafts.get(request.room, ()))
        self.num_steps += 1

    def _commit(self, request: Request, drafts: Sequence[int]) -> None:
        start, count = request.num_output_tokens, 1
        text = self._texts[request.room][start:]
        while count <= len(drafts) and drafts[count - 1] == text[count - 1]:
            count += 1
        for token in text[:count]:
            request.append(token)
        request.computed_len -= 1 + len(drafts) - count
        request.has_ended = request.is_full

    def run(self) -> float:
        while not all(request.is_full for request in self.requests):
            self.step()
        return self.now_s


class OverlappedWorld(World):
    """The same where a step is planned while another runs, unless that has drafts.

    The host works for `host_s` behind each result, before it plans the next step.
    """

    def __init__(
        self, texts: Mapping[int, Sequence[int]], source: DraftSource | None, cost: Cost, asking_s: float, host_s: float
    ) -> None:
        super().__init__(texts, source, cost, asking_s)
        self._host_s = host_s
        self._flying: Step | None = None
        self._ends_s = 0.0

    def step(self) -> None:
        if self._flying is not None and self._flying.drafts:
            self._end()
        running = [each for each in self.requests if each.computed_len + 1 < each.max_len and not each.is_full]
        step = self._launch(running) if running else None
        if self._flying is not None:
            self._end()
        self._flying = step

    def _launch(self, running: Sequence[Request]) -> Step:
        began_s, ahead = self.now_s, {each.room: each.computed_len + 1 - each.num_tokens for each in running}
        guesses = self.drafter.propose(running)
        drafts = {room: guess[ahead[room] :] for room, guess in guesses.items() if len(guess) > ahead[room]}
        step = new_step(running, [], drafts)
        self.drafter.launched(step, began_s)
        step.launch()
        num_drafts = sum(map(len, (step.drafts or {}).values()))
        self.num_drafted.append(num_drafts)
        self._new_end_s = max(self.now_s, self._ends_s) + self._cost(len(running) + num_drafts)
        if self._flying is None:
            self._ends_s = self._new_end_s
        self.num_steps += 1
        return step

    def _end(self) -> None:
        assert self._flying is not None
        step, self._flying = self._flying, None
        self.now_s, self._ends_s = max(self.now_s, self._ends_s), self._new_end_s
        self.drafter.committed(self.now_s)
        for request in step.decodes:
            self._commit(request, step.drafts_of(request))
        self.now_s += self._host_s


def know_plain_steps(drafter: SourceDrafter, requests: Sequence[Request]) -> None:
    """Have a drafter know what a step of so many requests takes."""
    for number in range(KNOWN + 1):
        drafter.launched(new_step(requests, []), float(number))
        drafter.committed(number + 0.5)


def texts_of(num_requests: int, num_tokens: int) -> dict[int, list[int]]:
    rng = random.Random(7)
    return {room: [rng.randrange(1000) for _ in range(num_tokens)] for room in range(1, num_requests + 1)}


def speedup(source: DraftSource, texts: Mapping[int, Sequence[int]], cost: Cost, asking_s: float = 30e-6) -> float:
    return World(texts, None, cost).run() / World(texts, source, cost, asking_s).run()


def always(index: int) -> bool:
    return True


def never(index: int) -> bool:
    return False


def randomly(share: float) -> Callable[[int], bool]:
    rng = random.Random(3)
    return lambda index: rng.random() < share


def test_right_guesses_pay() -> None:
    texts = texts_of(1, 400)
    assert speedup(Oracle(texts, always, 0.9), texts, cpu) > 4.0


@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("said", [0.3, 0.99])
@pytest.mark.parametrize("cost", [cpu, dear])
def test_wrong_guesses_cost_next_to_nothing_however_sure_the_source_is(
    num_requests: int, said: float, cost: Cost
) -> None:
    texts = texts_of(num_requests, 300)
    assert speedup(Oracle(texts, never, said), texts, cost) > 0.97


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [cpu, dear])
def test_no_source_makes_tokens_slower(share: float, cost: Cost) -> None:
    texts = texts_of(4, 400)
    assert speedup(Oracle(texts, randomly(share), 0.7), texts, cost) > 0.98


def test_a_source_that_is_too_modest_is_believed_more_than_it_says() -> None:
    texts = texts_of(2, 500)
    assert speedup(Oracle(texts, always, 0.55), texts, cpu) > 2.5


def test_a_request_that_does_not_profit_takes_nothing_from_one_that_does() -> None:
    texts = texts_of(2, 600)
    source = Oracle(texts, always, 0.9)
    guess = source.guess
    wrong = lambda request, at_most: Guess(tuple(-1 for _ in range(at_most)), guess(request, at_most).chances)  # noqa: E731
    source.guess = lambda request, at_most: (wrong if request.room == 1 else guess)(request, at_most)  # type: ignore[method-assign]
    world = World(texts, source, cpu)
    for _ in range(40):
        world.step()
    drafts = world.drafter.propose(world.requests)
    assert 1 not in drafts
    assert len(drafts[2]) > 8


def test_a_request_that_profits_later_has_drafts_later() -> None:
    texts = texts_of(1, 800)
    world = World(texts, Oracle(texts, lambda index: index >= 400, 0.9), cpu)
    while world.requests[0].num_output_tokens < 400:
        world.step()
    world.num_drafted.clear()
    for _ in range(30):
        world.step()
    assert max(world.num_drafted) > 8


def test_requests_for_which_asking_does_not_pay_are_asked_less_often() -> None:
    """Where a step is short and asking about all takes half of it."""
    texts = texts_of(32, 300)
    source = Oracle(texts, never, 0.9)
    world = World(texts, source, lambda num_tokens: 0.002, asking_s=30e-6)
    took_s = world.run()
    assert world.num_steps == 299
    assert took_s < 1.06 * 299 * 0.002
    assert source.num_asked < 32 * 299 / 8


def test_a_step_in_which_a_prompt_is_computed_says_nothing_of_tokens() -> None:
    texts = texts_of(1, 50)
    world = World(texts, Oracle(texts, always, 0.9), cpu)
    for _ in range(5):
        world.step()
    before = [len(row) for row in world.drafter.propose(world.requests).values()]
    other = new_request(9, np.arange(100), SamplingParams(max_tokens=5))
    for _ in range(10):
        world.drafter.launched(new_step(world.requests, [Chunk(other, 0, 50, is_last=False)], None), world.now_s)
        world.now_s += 10.0
        world.drafter.committed(world.now_s)
    assert [len(row) for row in world.drafter.propose(world.requests).values()] == before


@pytest.mark.parametrize(("chosen", "has_drafts"), [("", True), ("suffix", True), ("ngram", True), ("off", False)])
def test_a_request_may_want_none(chosen: str, has_drafts: bool) -> None:
    """A source that the worker does not have is taken to be the one that it has."""
    texts = texts_of(1, 200)
    world = World(texts, Oracle(texts, always, 0.9), cpu)
    world.requests = [world.request(1, speculate=chosen)]
    for _ in range(8):
        world.step()
    assert bool(world.drafter.propose(world.requests)) is has_drafts


def test_of_sources_of_text_one_is_asked_and_all_others_are_asked_first() -> None:
    texts = texts_of(1, 60)
    names = ("forced", "suffix", "ngram")
    silent = {name: Oracle({1: ()}, always, 0.9) for name in names}
    drafter = SourceDrafter(silent, lambda: 0.0, 64)
    world = World(texts, None, cpu)
    know_plain_steps(drafter, world.requests)
    for chosen, asked in (("", (1, 1, 0)), ("ngram", (1, 0, 1)), ("off", (0, 0, 0))):
        before = [source.num_asked for source in silent.values()]
        drafter.propose([world.request(1, speculate=chosen)])
        now = [source.num_asked for source in silent.values()]
        assert tuple(b - a for a, b in zip(before, now, strict=True)) == asked


def test_no_draft_is_behind_the_end_of_an_output() -> None:
    texts = texts_of(1, 12)
    world = World(texts, Oracle(texts, always, 0.9), lambda num_tokens: 1.0)
    while (request := world.requests[0]).num_output_tokens < 12:
        assert sum(map(len, world.drafter.propose([request]).values())) < 12 - request.num_output_tokens
        world.step()


def test_a_guess_begins_with_the_token_that_a_running_step_computes() -> None:
    texts = texts_of(1, 300)
    world = World(texts, Oracle(texts, always, 0.9), cpu)
    for _ in range(20):
        world.step()
    request = world.requests[0]
    request.computed_len += 1  # a step runs
    start = request.num_output_tokens
    [guess] = world.drafter.propose([request]).values()
    assert list(guess) == texts[1][start : start + len(guess)]
    assert 2 < len(guess) <= MAX_ROW_DRAFTS + 1


def test_accepted_drafts_are_counted_by_place_and_the_time_that_they_saved() -> None:
    texts = texts_of(1, 200)
    world = World(texts, Oracle(texts, lambda index: index % 5 != 4, 0.8), cpu)
    took_s = world.run()
    report = world.drafter.report()
    [counts] = report.sources
    assert counts.source == "suffix"
    assert counts.verified[0] == sum(drafted > 0 for drafted in world.num_drafted)
    assert sum(counts.verified) == sum(world.num_drafted)
    assert sum(counts.accepted) == 199 - world.num_steps
    assert counts.accepted == sorted(counts.accepted, reverse=True)
    assert report.saved_s == pytest.approx(199 * cpu(1) - took_s, rel=0.1)
    assert report.num_asked == sum(drafted > 0 for drafted in world.num_drafted)


def test_sources_hear_of_requests_that_have_ended() -> None:
    texts = texts_of(2, 20) | {3: [1] * 100}
    source = Oracle(texts, always, 0.9)
    world = World(texts, source, cpu)
    while not world.requests[0].has_ended:
        world.step()
    assert source.ended == []
    world.step()
    assert source.ended == [1, 2]


def test_a_room_may_come_again_with_another_request() -> None:
    texts = texts_of(1, 40)
    world = World(texts, Oracle(texts, always, 0.9), cpu)
    for _ in range(6):
        world.step()
    world.requests = [world.request(1)]
    world.run()
    assert sum(world.num_drafted) > 20


def test_counts_of_nothing_are_zeros() -> None:
    report = SourceDrafter({"ngram": Oracle({}, always, 0.5)}, lambda: 0.0, 64, max_drafts=3).report()
    assert report.sources == [SourceCounts("ngram", [0, 0, 0], [0, 0, 0])]
    assert report.nbytes == 100


@pytest.mark.parametrize("share", [0.2, 0.3, 0.35, 0.4, 0.5, 0.8])
@pytest.mark.parametrize("host_s", [0.0005, 0.001, 0.002])
def test_what_the_host_does_behind_drafts_is_part_of_what_they_cost(share: float, host_s: float) -> None:
    """It is hidden behind steps without drafts, while the next one runs. Rows cost next to nothing."""
    texts = texts_of(8, 3000)
    cost: Cost = lambda num_tokens: 0.005 + 0.00002 * num_tokens  # noqa: E731
    world = OverlappedWorld(texts, Oracle(texts, randomly(share), share), cost, 10e-6, host_s)
    for _ in range(400):
        world.step()
    num_tokens = sum(request.num_output_tokens - 1 for request in world.requests)
    plain_s, told_s = num_tokens * cost(8) / 8, world.drafter.report().saved_s
    assert plain_s / world.now_s > 0.98
    assert told_s == pytest.approx(plain_s - world.now_s, abs=0.02 * plain_s)


@pytest.mark.parametrize(("share", "host_s", "least"), [(0.35, 0.001, 1.08), (0.4, 0.001, 1.18), (0.5, 0.002, 1.18)])
def test_drafts_go_on_that_pay_behind_others_only(share: float, host_s: float, least: float) -> None:
    """Behind a step without drafts the first guess is of what that step computes: it has to be right too."""
    texts = texts_of(8, 3000)
    cost: Cost = lambda num_tokens: 0.005 + 0.00002 * num_tokens  # noqa: E731
    world = OverlappedWorld(texts, Oracle(texts, randomly(share), share), cost, 10e-6, host_s)
    for _ in range(400):
        world.step()
    num_tokens = sum(request.num_output_tokens - 1 for request in world.requests)
    assert num_tokens * cost(8) / 8 / world.now_s > least


class LateWorld(World):
    """Notes how many tokens came true of rows with drafts, and are to be seen by states in the step behind."""

    def __init__(self, texts: Mapping[int, Sequence[int]], late: LateCosts) -> None:
        super().__init__(texts, Oracle(texts, randomly(0.7), 0.7), cpu)
        self.drafter = SourceDrafter({"suffix": self}, self._clock, 256, late=late)
        self.num_late = [0]

    def step(self) -> None:
        self.num_late.append(0)
        super().step()

    def _commit(self, request: Request, drafts: Sequence[int]) -> None:
        num_before = request.num_tokens
        super()._commit(request, drafts)
        self.num_late[-1] += request.num_tokens - num_before if drafts and not request.has_ended else 0


def test_a_step_is_told_how_many_tokens_states_see_late_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told, real = [], StepTimer.launched

    def launched(self: StepTimer, step: Launched) -> None:
        told.append(step.num_late)
        real(self, step)

    monkeypatch.setattr(StepTimer, "launched", launched)
    world = LateWorld(texts_of(2, 80), NO_PASS)
    world.run()
    assert told == world.num_late[:-1]
    assert len({*told}) > 3


def test_nobody_has_drafts_where_the_pass_that_they_need_takes_longer_than_they_save() -> None:
    dear_pass = LateWorld(texts_of(2, 80), LateCosts(lambda: ((1, 1.0),)))
    dear_pass.run()
    assert not any(dear_pass.num_drafted)


def test_drafts_pay_where_the_host_takes_long_and_guesses_are_right() -> None:
    texts = texts_of(2, 400)
    cost: Cost = lambda num_tokens: 0.005 + 0.00002 * num_tokens  # noqa: E731
    plain = OverlappedWorld(texts, None, cost, 0.0, 0.002)
    drafting = OverlappedWorld(texts, Oracle(texts, always, 0.9), cost, 10e-6, 0.002)
    assert plain.run() / drafting.run() > 6


def test_steps_that_do_not_overlap_are_compared_as_they_are() -> None:
    """What the host does between them is behind each, with drafts or without."""
    texts = texts_of(1, 100)
    world = World(texts, Oracle(texts, always, 0.9), cpu)
    for _ in range(40):
        world.now_s += 10.0
        world.step()
        if world.requests[0].is_full:
            break
    assert max(world.num_drafted) > 8


@pytest.mark.parametrize(("chosen", "learns"), [("off", False), ("ngram", False), ("suffix", True), ("", True)])
def test_an_answer_teaches_only_sources_that_its_request_chose(chosen: str, learns: bool) -> None:
    texts = {1: [1] * 20}
    sources = {"suffix": Oracle(texts, always, 0.9), "ngram": Oracle(texts, always, 0.9)}
    drafter = SourceDrafter(sources, lambda: 0.0, 64)
    request = World(texts, None, cpu).request(1, speculate=chosen)
    drafter.propose([request])
    request.has_ended = True
    drafter.propose([])
    assert sources["suffix"].ended == ([1] if learns else [])


def test_a_report_has_all_that_came_before() -> None:
    texts = texts_of(1, 60)
    source = Oracle(texts, always, 0.9)
    world = World(texts, source, cpu)
    world.run()
    [counts] = world.drafter.report().sources
    assert sum(counts.accepted) == 59 - world.num_steps
    assert source.ended == [1]


def test_a_request_whose_room_another_one_takes_is_no_more_kept() -> None:
    texts = texts_of(1, 40)
    source = Oracle(texts, always, 0.9)
    world = World(texts, source, cpu)
    world.step()
    world.drafter.propose([world.request(1, speculate="off")])
    assert source.ended == [1]


@pytest.mark.parametrize("num_steps", [1, 200])
def test_nobody_is_asked_while_no_step_without_prompts_was_measured(num_steps: int) -> None:
    texts = texts_of(8, 300)
    source = Oracle(texts, always, 0.9)
    world = World(texts, source, cpu)
    other = new_request(99, np.arange(10_000), SamplingParams(max_tokens=5))
    for _ in range(num_steps):
        step = new_step(world.requests, [Chunk(other, 0, 50, is_last=False)], world.drafter.propose(world.requests))
        world.drafter.launched(step, world.now_s)
        world.now_s += 0.01
        world.drafter.committed(world.now_s)
        for request in world.requests:
            request.append(texts[request.room][request.num_output_tokens])
            request.computed_len += 1
    assert source.num_asked == 0


def test_a_request_that_takes_long_to_ask_about_has_only_itself_wait_longer() -> None:
    texts = texts_of(2, 500)
    source = Oracle(texts, never, 0.9)
    world = World(texts, source, lambda num_tokens: 0.005)
    asked = {1: 0, 2: 0}
    guess = source.guess

    def guess_slowly(request: Request, at_most: int) -> Guess:
        asked[request.room] += 1
        world.now_s += 0.002 if request.room == 1 else 10e-6
        return guess(request, at_most)

    source.guess = guess_slowly  # type: ignore[method-assign]
    world.run()
    assert asked[1] < 20
    assert asked[2] > 400


@pytest.mark.parametrize("is_right", [True, False])
def test_drafts_that_a_bad_record_cost_a_request_are_compared_until_they_would_have_paid(is_right: bool) -> None:
    texts = texts_of(2, 300)
    world = World(texts, Oracle(texts, lambda index: is_right or index < 100, 0.9), cpu)
    while world.requests[0].num_output_tokens < 100:
        world.step()
    for drafted in world.drafter._drafted.values():
        world.drafter._settle(drafted)
        drafted.records.learn(0, -100.0)
    world.num_drafted.clear()
    for _ in range(10):
        world.step()
    assert world.num_drafted[:2] == [0, 0]
    assert (max(world.num_drafted) > 8) == is_right
    assert RequestRecords(world.drafter._records).of(0).is_good == is_right
