"""Drafts, given by a test: whatever is guessed, the outputs are those of a worker that guesses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from null_runner import NullRunner, expected_output
from stepped_engine import PAGE, VOCAB, Engine

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.running import Drafter, Running
from diptych.engine.schedule.sampled import verified
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, ForwardMode
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams

K = 2
NUM_PAGES = 64
NewEngine = Callable[..., Engine]
Outputs = Mapping[int, Sequence[int]]


class ToyDrafter(Drafter):
    """Knows how outputs go on, and guesses `K` tokens: right ones, or wrong ones in the places that `is_wrong` says."""

    def __init__(
        self, outputs: Outputs, is_wrong: Callable[[int], bool] = lambda index: False, only_from: int = 0
    ) -> None:
        self._outputs = outputs
        self._is_wrong = is_wrong
        self._only_from = only_from  # an output's token
        self.num_proposed = 0
        self.num_early = 0  # asked about requests whose newest token was on its way

    def propose(self, requests: Sequence[Request]) -> Drafts:
        self.num_early += sum(not request.extend_len for request in requests)
        guesses = {r.room: self._guess(r) for r in requests if r.num_output_tokens >= self._only_from}
        self.num_proposed += sum(map(len, guesses.values()))
        return {room: guess for room, guess in guesses.items() if guess}

    def _guess(self, request: Request) -> tuple[int, ...]:
        start = request.num_output_tokens
        following = self._outputs[request.room][start : start + K]
        return tuple(token + self._is_wrong(start + i) for i, token in enumerate(following))


def prompt_of(room: int) -> list[int]:
    return list(range(room, room + 3 + 5 * room))


def outputs_of(rooms: Sequence[int], num_tokens: int) -> dict[int, list[int]]:
    return {room: expected_output(prompt_of(room), num_tokens, VOCAB) for room in rooms}


def test_right_guesses_save_steps_and_come_with_those_before_them(new_engine: NewEngine) -> None:
    expected = expected_output(prompt_of(1), 10, VOCAB)
    engine = new_engine(drafter=ToyDrafter({1: expected}))
    engine.start(1, prompt_of(1), 10)
    engine.run()
    assert (
        [output.token_ids for output in engine.outputs[1]]
        == [
            (expected[0],),  # by the prompt
            tuple(expected[1:4]),
            tuple(expected[4:7]),
            tuple(expected[7:10]),
        ]
    )
    assert [output.first_index for output in engine.outputs[1]] == [0, 1, 4, 7]
    assert engine.outputs[1][-1].finish is Finish.LENGTH
    assert engine.num_steps == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "is_wrong",
    [lambda index: False, lambda index: True, lambda index: index % 2 == 0, lambda index: index % 3 == 0],
    ids=["right", "wrong", "every other", "every third"],
)
def test_no_guess_changes_an_output(new_engine: NewEngine, overlap: bool, is_wrong: Callable[[int], bool]) -> None:
    """Requests come while others decode, so that rows with drafts stand before prompts too."""
    rooms = range(1, 7)
    expected = outputs_of(rooms, 30)
    drafter = ToyDrafter(expected, is_wrong)
    engine = new_engine(drafter=drafter, overlap=overlap, max_step_tokens=8, num_pages=128)
    for room in rooms:
        engine.start(room, prompt_of(room), 20 + room)
        for _ in range(3):
            engine.step()
    engine.run()
    assert {room: engine.tokens(room) for room in rooms} == {room: expected[room][: 20 + room] for room in rooms}
    assert drafter.num_proposed > 60


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_retracted_goes_on_with_drafts(new_engine: NewEngine, overlap: bool) -> None:
    rooms = range(1, 5)
    expected = outputs_of(rooms, 60)
    drafter = ToyDrafter({**expected, **{10_000 + room: () for room in range(20)}}, lambda index: index % 3 == 0)
    engine = new_engine(drafter=drafter, overlap=overlap, num_pages=40)
    engine.expect_short_outputs()
    for room in rooms:
        engine.start(room, prompt_of(room), 60)
    engine.run()
    assert {room: engine.tokens(room) for room in rooms} == expected
    assert engine.core.report().counts.retractions > 0


class Wrong(Drafter):
    """Guesses six tokens that never come."""

    def propose(self, requests: Sequence[Request]) -> Drafts:
        return {request.room: (VOCAB - 1,) * 6 for request in requests}


@pytest.mark.parametrize("num_pages", [14, 16, 18])
def test_nobody_is_retracted_for_the_page_of_a_guess(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    """Whenever somebody is, no request holds a page that its tokens have not come to."""
    rooms, spare = range(1, 7), list[int]()
    retract = Running._retract

    def noted(running: Running, request: Request) -> None:
        spare.extend(each.num_pages - each.computed_len // PAGE - 1 for each in running._batch)
        retract(running, request)

    monkeypatch.setattr(Running, "_retract", noted)
    engine = new_engine(drafter=Wrong(), num_pages=num_pages)
    engine.expect_short_outputs()
    for room in rooms:
        engine.start(room, [room] * (room + 2), 8 + 5 * room)
    engine.run()
    assert spare
    assert max(spare) <= 0
    for room in rooms:
        assert engine.tokens(room) == expected_output([room] * (room + 2), 8 + 5 * room, VOCAB)


@pytest.mark.parametrize("end", [4, 5])
def test_an_output_ends_at_a_stop_token_among_its_drafts(new_engine: NewEngine, end: int) -> None:
    """Those behind it are neither accepted nor rejected."""
    expected = expected_output(prompt_of(1), 10, VOCAB)
    stop = expected[end]
    assert stop not in expected[:end]
    engine = new_engine(drafter=ToyDrafter({1: expected}))
    engine.start_with(1, prompt_of(1), SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=(stop,)))
    engine.run()
    assert engine.tokens(1) == expected[: end + 1]
    last = engine.outputs[1][-1]
    assert last.finish is Finish.STOP
    assert (last.num_drafts, last.num_accepted) == (end - 3, end - 3)


def test_a_request_that_is_aborted_while_its_drafts_are_verified_gives_its_pages_back(new_engine: NewEngine) -> None:
    expected = outputs_of((1, 2), 30)
    engine = new_engine(drafter=ToyDrafter(expected), overlap=True)
    for room in (1, 2):
        engine.start(room, prompt_of(room), 30)
    while not engine.tokens(1)[2:]:
        engine.step()
    engine.abort(1)
    engine.run()
    assert engine.outputs[1][-1].failure is not None
    assert engine.tokens(2) == expected[2]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_without_guesses_are_planned_while_others_run(new_engine: NewEngine, overlap: bool) -> None:
    """A drafter costs no overlap where it guesses nothing, and what it guesses begins behind a token on its way."""
    expected = outputs_of((1,), 40)
    drafter = ToyDrafter(expected, only_from=20)
    engine = new_engine(drafter=drafter, overlap=overlap)
    engine.start(1, prompt_of(1), 40)
    engine.run()
    assert engine.tokens(1) == expected[1]
    lens = [len(output.token_ids) for output in engine.outputs[1]]
    assert lens[:20] == [1] * 20
    assert lens[20 + overlap :].count(1 + K) >= 5
    assert drafter.num_early == (21 if overlap else 0), "asked while the token before was on its way"


def test_what_a_step_with_drafts_brought_is_told_while_the_next_one_runs(new_engine: NewEngine) -> None:
    """The next is planned behind its commit, and begins before anybody hears of its tokens."""
    expected = outputs_of((1,), 40)
    engine = new_engine(drafter=ToyDrafter(expected), overlap=True)
    engine.start(1, prompt_of(1), 40)
    told = []
    while engine.step():
        told.append(len(engine.tokens(1)))
        assert engine._stepping._is_running == (told[-1] < 40)  # type: ignore[attr-defined]  # a step of its own
    assert engine.tokens(1) == expected[1]
    assert told[:4] == [0, 1, 3, 6], "the first guess was made while the first token was on its way"


def test_a_step_has_no_more_drafts_than_it_may(new_engine: NewEngine) -> None:
    expected = outputs_of((1, 2, 3), 12)
    runner = DraftCounter()
    engine = new_engine(drafter=ToyDrafter(expected), runner=runner, max_drafts=3)
    for room in expected:
        engine.start(room, prompt_of(room), 12)
    engine.run()
    assert {room: engine.tokens(room) for room in expected} == expected
    assert max(runner.num_drafts) == 3


def test_what_is_no_token_of_the_model_is_no_draft(new_engine: NewEngine) -> None:
    """Prompts with pictures have keys in place of tokens, which a guess may repeat."""
    expected = outputs_of((1,), 12)
    with_key = {1: [*expected[1][:5], 2**40, *expected[1][6:]]}
    engine = new_engine(drafter=ToyDrafter(with_key))
    engine.start(1, prompt_of(1), 12)
    engine.run()
    assert engine.tokens(1) == expected[1]


class DraftCounter(NullRunner):
    """Notes how many drafts each step has."""

    def __init__(self) -> None:
        super().__init__(np.zeros((NUM_PAGES, PAGE), dtype=np.uint64), VOCAB)
        self.num_drafts: list[int] = []

    def logits(self, batch: ForwardBatch) -> list[int]:
        self.num_drafts.append(batch.num_samples - int((batch.num_sampled > 0).sum()))
        return super().logits(batch)


class SilentRunner(NullRunner):
    """Has no token behind so many."""

    def __init__(self, silent_len: int) -> None:
        super().__init__(np.zeros((NUM_PAGES, PAGE), dtype=np.uint64), VOCAB)
        self._silent_len = silent_len

    def logits(self, batch: ForwardBatch) -> list[int]:
        tokens, positions = super().logits(batch), batch.positions[batch.sampled_tokens]
        return [NO_TOKEN if at + 1 == self._silent_len else token for token, at in zip(tokens, positions, strict=True)]


@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 5])
def test_a_token_that_is_none_fails_its_request_behind_the_tokens_before_it(
    new_engine: NewEngine, num_before: int
) -> None:
    prompt = prompt_of(1)
    expected = expected_output(prompt, 10, VOCAB)
    engine = new_engine(drafter=ToyDrafter({1: expected}), runner=SilentRunner(len(prompt) + num_before))
    engine.start(1, prompt, 10)
    engine.run()
    assert engine.tokens(1) == expected[:num_before]
    failure = engine.outputs[1][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.INTERNAL


@pytest.mark.parametrize(
    ("drafts", "samples", "tokens"),
    [
        ((), (5,), (5,)),
        ((), (NO_TOKEN,), (NO_TOKEN,)),
        ((5, 6), (5, 6, 7), (5, 6, 7)),
        ((5, 6), (5, 8, 7), (5, 8)),
        ((5, 6), (4, 6, 7), (4,)),
        ((5, 6), (5, 6, NO_TOKEN), (5, 6)),
        ((5, 6), (NO_TOKEN, 6, 7), (NO_TOKEN,)),
    ],
)
def test_drafts_are_verified_by_equality(
    drafts: tuple[int, ...], samples: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    assert verified(drafts, samples) == tokens


class Counting:
    """Counts the rows of several tokens that a runner computes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_rows = {mode: 0 for mode in ForwardMode}

    def execute(self, batch: Any, sampling: Any) -> Any:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        self.num_rows[batch.mode] += int((batch.num_sampled > 1).sum())
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: Any) -> Any:
        return self._runner.sample(batch, logits, sampling)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_says_the_same_of_rows_as_of_single_tokens(
    new_engine: NewEngine, tiny_folder: Path, backend: str, overlap: bool
) -> None:
    """Greedy and drawn: a draw depends on its seed and position alone."""
    source = open_model(str(tiny_folder))
    asked = {room: SamplingParams(20, 0.9 * (room % 2), seed=room, ignore_eos=True) for room in range(1, 6)}

    def answers(drafter: ToyDrafter) -> tuple[dict[int, list[int]], Counting]:
        layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
        kv = torch.full(layout.shape, torch.nan)
        runner = Counting(ModelRunner(source, kv, dtype="float32", attention_backend=backend))
        engine = new_engine(
            drafter=drafter, overlap=overlap, runner=runner, vocab_size=source.config.vocab_size, max_step_tokens=12
        )
        for room, params in asked.items():
            engine.start_with(room, [each % 90 for each in prompt_of(room)], params)
            engine.step()
        engine.run()
        return {room: engine.tokens(room) for room in asked}, runner

    plain, _ = answers(ToyDrafter({room: () for room in asked}))
    drafted, runner = answers(ToyDrafter(plain, lambda index: index % 4 == 3))
    assert drafted == plain
    assert runner.num_rows[ForwardMode.DECODE] > 5
    assert runner.num_rows[ForwardMode.MIXED] > 0
