"""Guesses of a draft model: how far, when, and what they are taken to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from diptych.common.arrays import I64
from diptych.engine.drafting.ahead import FIRST_PERIOD, FOLLOWED, TRIAL, AheadSource, Wanted
from diptych.engine.drafting.budget import Passes, share_out
from diptych.engine.drafting.drafter import SourceDrafter
from diptych.engine.drafting.ngram import NgramSource
from diptych.engine.drafting.record import ALLOWED, FORGIVEN, LEAST
from diptych.engine.drafting.step_costs import KNOWN, StepCosts
from diptych.engine.values.batch import NO_TOKEN, PART_TOKENS, DraftBatch
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Chunk, new_step
from diptych.generation.request_groups import Hints
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.ownership import NULL_PAGE

PAGE, NUM_PAGES = 8, 500
PASS_S, STEP_S, ROW_S = 0.1, 1.0, 0.01


class Model:
    """Implements `DraftModel`: knows texts, and guesses all tokens wrong unless it `is_right`. Passes take time."""

    def __init__(self, texts: Mapping[int, Sequence[int]], is_right: bool = True, pass_s: float = PASS_S) -> None:
        self.texts = texts
        self.is_right = is_right
        self.pass_s = pass_s
        self.now_s = 0.0
        self.asked: list[DraftBatch] = []

    def clock(self) -> float:
        return self.now_s

    def row(self, slot: int) -> bytes:
        return b""

    def put_row(self, slot: int, row: bytes) -> None:
        raise AssertionError("it joins no rows")

    def draft(self, batch: DraftBatch) -> I64:
        self.asked.append(batch)
        self.now_s += self.pass_s * batch.most
        found = np.full((len(batch.token_ids), batch.most), NO_TOKEN)
        for row, (position, count) in enumerate(zip(batch.positions, batch.num_drafts, strict=True)):
            text = self.texts[int(batch.page_table[row, 0])]
            found[row, :count] = np.array(text[position + 1 : position + 1 + count]) + (not self.is_right)
        return found


class World:
    """Steps a drafter as `Running` does, on requests whose pages are named by their room."""

    def __init__(
        self, rooms: Sequence[int], *, is_right: bool = True, speculate: str = "", pass_s: float = PASS_S
    ) -> None:
        texts = {room: [(room * 7 + at * at) % 97 for at in range(4000)] for room in rooms}
        self.model = Model(texts, is_right, pass_s)
        table = np.zeros((len(rooms), NUM_PAGES), np.int32)
        self.requests = [self._request(room, row, table, speculate) for row, room in enumerate(rooms)]
        self.ahead = AheadSource(self.model, table, PAGE)
        self.drafter = SourceDrafter({"ngram": NgramSource()}, self.model.clock, 64, ahead=self.ahead)
        self.num_drafts: list[int] = []

    def _request(self, room: int, row: int, table: np.ndarray, speculate: str) -> Request:
        text = self.model.texts[room]
        params = SamplingParams(max_tokens=3900)
        request = new_request(room, np.array(text[:4]), params, hints=Hints(speculate=speculate))
        request.append(text[4])
        request.computed_len, request.row, request.num_pages = 4, row, NUM_PAGES
        table[row] = room
        return request

    def step(self) -> None:
        began_s = self.model.now_s
        drafts = self.drafter.propose(self.requests)
        num_drafts = sum(map(len, drafts.values()))
        step = new_step(self.requests, [], drafts)
        is_followed = self.drafter.follows(step)
        self.drafter.launched(step, began_s)
        self.num_drafts.append(num_drafts)
        self.model.now_s += STEP_S + ROW_S * (len(self.requests) + num_drafts) + is_followed * self.model.pass_s
        self.drafter.committed(self.model.now_s)
        for request in self.requests:
            text = self.model.texts[request.room][request.num_tokens :]
            guess = drafts.get(request.room, ())
            count = 1 + next((at for at, token in enumerate(guess) if token != text[at]), len(guess))
            for token in text[:count]:
                request.append(token)
            request.computed_len = request.num_tokens - 1


def test_a_guess_goes_no_further_than_the_pages_that_its_request_holds() -> None:
    world = World([1])
    request = world.requests[0]
    request.num_pages = 1
    assert len(world.ahead.guess(request, 15).token_ids) == PAGE - 4
    [found] = world.ahead.fulfil([Wanted(request, PAGE - 4)], world.model.clock)
    last = world.model.asked[-1].step(PAGE - 5)
    assert last.out_slots.tolist() == [1 * PAGE + PAGE - 1]
    assert list(found) == world.model.texts[1][5 : PAGE + 1]


def test_requests_are_guessed_for_together_and_those_that_go_further_are_first() -> None:
    world = World([3, 5, 8])
    wanted = [Wanted(request, count) for request, count in zip(world.requests, (1, 4, 2), strict=True)]
    found = world.ahead.fulfil(wanted, world.model.clock)
    assert found == [tuple(world.model.texts[each.request.room][5 : 5 + each.num_tokens]) for each in wanted]
    [batch] = world.model.asked
    assert batch.num_drafts.tolist() == [4, 2, 1]
    assert [batch.step(place).batch_size for place in range(4)] == [3, 2, 1, 1]
    assert batch.step(2).input_ids.tolist() == [-1]
    assert batch.step(1).positions.tolist() == [5, 5]
    assert world.ahead.pass_s == pytest.approx(PASS_S)


def test_passes_count_in_what_a_step_costs() -> None:
    costs = StepCosts()
    for _ in range(KNOWN):
        for number in (1, 2, 4, 8, 16):
            costs.learn(number, STEP_S)
    chances = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]]
    assert share_out(chances, 1, costs, 64).counts == [7]
    few = share_out(chances, 1, costs, 64, Passes({0: 0}, 0.2))
    assert few.counts == [5]
    assert few.saved_s == pytest.approx(4.5 * STEP_S - (STEP_S + 5 * 0.2))
    assert share_out(chances, 1, costs, 64, Passes({0: 0}, 1.0)).counts == [0]


def test_a_pass_is_paid_once_for_all_requests() -> None:
    costs = StepCosts()
    for _ in range(KNOWN):
        for number in (4, 8, 16):
            costs.learn(number, STEP_S)
    alone = share_out([[0.5, 0.2]], 4, costs, 64, Passes({0: 0}, 0.2))
    together = share_out([[0.5, 0.2]] * 4, 4, costs, 64, Passes(dict.fromkeys(range(4), 0), 0.2))
    assert (alone.counts, together.counts) == ([0], [1, 1, 1, 1])


def test_a_model_that_is_right_is_asked_in_each_step() -> None:
    world = World([1, 2])
    for _ in range(20):
        world.step()
    assert min(world.num_drafts[8:]) > 8
    [_, counts] = world.drafter.report().sources
    assert counts.source == "draft"
    assert counts.accepted == counts.verified
    assert world.drafter.report().saved_s > 0


def test_a_model_that_is_wrong_is_asked_no_more_but_for_trials() -> None:
    world = World([1])
    world.model.is_right = False
    for _ in range(240):
        world.step()
    late = world.num_drafts[40:]
    assert 0 < sum(late) <= 3 * TRIAL
    assert set(late) == {0, TRIAL}
    world.model.is_right = True
    for _ in range(8 * FIRST_PERIOD):
        world.step()
    assert min(world.num_drafts[-8:]) > 2


@pytest.mark.parametrize(("chosen", "is_asked"), [("", True), ("draft", True), ("ngram", False), ("off", False)])
def test_a_request_chooses_whether_it_is_asked_for(chosen: str, is_asked: bool) -> None:
    world = World([1], speculate=chosen)
    for _ in range(10):
        world.step()
    assert bool(world.model.asked) is is_asked


def test_a_bad_record_is_forgiven_also_beside_others_that_have_drafts_all_the_time() -> None:
    """Then there are no trials, and what it would have had is not even guessed."""
    world, num_steps, missing = World([1, 2, 3]), 0, 20
    for _ in range(20):
        world.step()
    drafted = world.drafter._settled(world.requests[0])
    for tokens in (-100.0, -LEAST - ALLOWED - missing * FORGIVEN):
        drafted.records.of(world.drafter._of_model).learn(tokens)
    while not drafted.num_drafts:
        world.step()
        num_steps += 1
        assert num_steps <= missing + 2
    assert num_steps >= missing
    assert sum(world.num_drafts[-num_steps:]) > 10 * num_steps, "of others"


def test_a_trial_costs_a_record_what_it_takes() -> None:
    """Its passes, its rows, and that the model follows its step."""
    world = World([1], is_right=False)
    while len(world.num_drafts) < 40 or world.num_drafts[-1] == 0:
        world.step()
    assert world.num_drafts[-1] == TRIAL
    record = world.drafter._drafted[1].records.of(world.drafter._of_model)
    record.learn(-record._tokens)
    world.drafter._settled(world.requests[0])
    took_s = TRIAL * (PASS_S + ROW_S) + PASS_S
    assert record._tokens == pytest.approx(-took_s / (STEP_S + ROW_S), rel=0.1)


def test_it_does_not_follow_steps_while_nobody_asks_and_is_told_what_it_missed() -> None:
    world = World([1, 2])
    first, second = world.requests
    world.ahead.fulfil([Wanted(second, 1)], world.model.clock)
    prompt = Chunk(new_request(9, np.arange(100), SamplingParams(max_tokens=5)), 0, 50, is_last=False)
    followed = []
    for _ in range(FOLLOWED + 150):
        followed.append(world.ahead.follows(new_step([first, second], [])))
        first.append(world.model.texts[1][first.num_tokens])
        first.computed_len += 1
    assert followed == [True] * FOLLOWED + [False] * 150
    assert world.ahead.follows(new_step([first], [prompt])), "others will go on behind prompts"
    first.cached_len = 20
    world.ahead.fulfil([Wanted(first, 2)], world.model.clock)
    [missed] = world.model.asked[-1].missed
    assert (missed.start, missed.shared_len) == (4 + FOLLOWED, 20)
    assert missed.token_ids.tolist() == world.model.texts[1][missed.start : first.num_tokens - 1]
    steps = list(world.model.asked[-1].catching_up())
    assert [len(step.input_ids) for step in steps] == [PART_TOKENS, 150 - PART_TOKENS]
    assert np.concatenate([step.positions for step in steps]).tolist() == list(range(missed.start, missed.start + 150))
    slots = np.concatenate([step.out_slots for step in steps]).tolist()
    num_shared = 20 - missed.start
    assert slots == [NULL_PAGE] * num_shared + [PAGE + at % PAGE for at in range(20, missed.start + 150)]
    assert steps[-1].seq_lens.tolist() == [missed.start + 150]
    assert world.ahead.follows(new_step([first], []))
    assert not world.ahead._batch([Wanted(first, 1)]).missed


@pytest.mark.parametrize("chosen", ["", "ngram", "off"])
def test_of_a_request_that_has_ended_nothing_is_kept_whoever_guessed_for_it(chosen: str) -> None:
    """Steps without guesses are not followed, and what is missed of them is noted of all their requests."""
    world = World([1, 2, 3], speculate=chosen)
    world.model.is_right = False
    for _ in range(30):
        world.step()
    held = world.drafter.report().nbytes
    assert held > 0
    for request in world.requests[1:]:
        request.has_ended = True
    assert world.drafter.report().nbytes == held / 3
    world.requests[0].has_ended = True
    assert world.drafter.report().nbytes == 0


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("pass_s", [STEP_S, 0.6 * STEP_S])
def test_a_model_that_takes_as_long_as_its_own_is_hardly_asked_however_right_it_is(
    num_requests: int, pass_s: float
) -> None:
    """What following takes is no part of what a step takes without it."""
    world = World(range(1, 1 + num_requests), pass_s=pass_s)
    while world.requests[0].num_output_tokens < 600:
        world.step()
    plain_s = (world.requests[0].num_output_tokens - 1) * (STEP_S + ROW_S * num_requests)
    assert world.model.now_s < plain_s / 0.96
