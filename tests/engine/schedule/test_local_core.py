from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner, expected_output
from stepped_engine import local_core

from diptych.engine.schedule.adapter_turns import EnoughSlots
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.limits import Scheduling
from diptych.engine.values.prompt_cost import STEP_COST
from diptych.engine.values.request import Request
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode

VOCAB = 1000
PAGE = 4


Engine = Any  # the fixture's class: test helpers can't be imported
NewEngine = Callable[..., Engine]


@pytest.mark.parametrize("prompt_len", [1, PAGE - 1, PAGE, PAGE + 1, 15, 16, 17, 100])
def test_output_is_what_the_model_says_for_any_prompt_length(engine: Engine, prompt_len: int) -> None:
    prompt = list(range(1, prompt_len + 1))
    engine.start(1, prompt, max_tokens=9)
    engine.run()
    assert engine.tokens(1) == expected_output(prompt, 9, VOCAB)
    assert engine.outputs[1][-1].finish is Finish.LENGTH


def test_every_token_has_its_index(engine: Engine) -> None:
    engine.start(1, [1, 2, 3], max_tokens=5)
    engine.run()
    assert [output.first_index for output in engine.outputs[1]] == [0, 1, 2, 3, 4]


def test_a_long_prompt_is_chunked_and_others_ride_along(engine: Engine) -> None:
    engine.start(1, list(range(40)), max_tokens=2)
    engine.start(2, [7, 8, 9], max_tokens=2)
    engine.step()
    engine.step()
    assert engine.outputs == {}
    engine.step()
    assert [len(engine.tokens(room)) for room in (1, 2)] == [1, 1]
    engine.run()


class Slow:
    """A runner that takes a millisecond of the engine's time for each token that it computes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[tuple[int, int]] = []  # requests, tokens

    def watch(self) -> None:
        execute = self._engine.runner.execute

        def timed(batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
            self.steps.append((batch.batch_size, len(batch.input_ids)))
            self._engine.now_s += len(batch.input_ids) / 1000
            result: StepResult = execute(batch, sampling)
            return result

        self._engine.runner.execute = timed


def test_a_request_that_runs_gets_its_tokens_while_prompts_are_computed_in_steps_of_bounded_time(
    new_engine: NewEngine,
) -> None:
    """Steps may have 200 tokens, which take 200 ms; but somebody waits for each of them, and they may take 40."""
    engine = new_engine(num_pages=512, max_step_tokens=200, mixed_step_s=0.04)
    slow = Slow(engine)
    slow.watch()
    engine.start(1, [1] * 100, max_tokens=60)
    engine.step()
    assert slow.steps == [(1, 100)], "nobody waits for it"
    for room in range(2, 6):
        engine.start(room, [room] * 200, max_tokens=2)
    while len(engine.tokens(1)) < 60:
        before = len(engine.tokens(1))
        engine.step()
        assert len(engine.tokens(1)) == before + 1, "every step has a token of it"
    assert max(tokens for _, tokens in slow.steps[1:]) <= 40 + 5
    assert [len(engine.tokens(room)) for room in range(2, 6)] == [2] * 4
    engine.run()


class NoTurn(EnoughSlots):
    """The first request has no turn while `is_on` is set."""

    is_on = False

    def runnable(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if not self.is_on or request.room != 1]


def test_prompts_are_bounded_beside_requests_that_have_no_turn_in_a_step(new_engine: NewEngine) -> None:
    turns = NoTurn()
    build = partial(local_core, turns=turns)
    engine = new_engine(num_pages=512, max_step_tokens=200, mixed_step_s=0.04, build=build)
    slow = Slow(engine)
    slow.watch()
    engine.start(1, [1] * 100, max_tokens=60)
    engine.step()
    turns.is_on = True
    engine.start(2, [2] * 200, max_tokens=2)
    engine.step()
    assert slow.steps[1:] == [(1, 40)]
    turns.is_on = False
    engine.run()


def test_a_cached_prefix_is_not_computed_again(engine: Engine) -> None:
    prompt = list(range(50))
    engine.start(1, prompt, max_tokens=1)
    engine.run()
    request = engine.start(2, prompt, max_tokens=3)
    engine.step()
    assert request.cached_len == 48
    engine.run()
    assert engine.tokens(2) == expected_output(prompt, 3, VOCAB)
    stats = engine.outputs[2][-1].stats
    assert stats is not None
    assert stats.cached_tokens == 48


def test_a_retracted_request_computes_again_and_ends_the_same(new_engine: NewEngine) -> None:
    engine = new_engine(num_pages=12)
    engine.expect_short_outputs()
    prompts = {room: [room * 10 + i for i in range(6)] for room in (1, 2, 3)}
    for room, prompt in prompts.items():
        engine.start(room, prompt, max_tokens=30)
    engine.run()
    assert engine.core.report().counts.retractions > 0
    for room, prompt in prompts.items():
        assert engine.tokens(room) == expected_output(prompt, 30, VOCAB)


@pytest.mark.parametrize(("retracted_s", "code"), [(30.0, FailureCode.RETRACTED), (math.inf, None)])
def test_a_retracted_request_waits_for_memory_as_long_as_it_may(
    new_engine: NewEngine, retracted_s: float, code: FailureCode | None
) -> None:
    engine = new_engine(num_pages=12, retracted_s=retracted_s)
    engine.expect_short_outputs()
    for room in (1, 2, 3):
        engine.start(room, [room * 10 + i for i in range(6)], max_tokens=30)
    while engine.core.report().counts.retractions == 0:
        engine.step()
    engine.now_s += 31.0
    engine.run()
    failures = [engine.outputs[room][-1].failure for room in (1, 2, 3)]
    assert {failure.code for failure in failures if failure is not None} == ({code} if code else set())


def test_an_abort_frees_everything_and_answers(engine: Engine) -> None:
    engine.start(1, list(range(40)), max_tokens=50)
    engine.start(2, [1, 2], max_tokens=50)
    engine.start(3, list(range(100)), max_tokens=50)
    for _ in range(4):
        engine.step()
    for room in (1, 2, 3, 99):
        engine.abort(room)
    engine.run()
    endings = {room: outputs[-1].failure for room, outputs in engine.outputs.items()}
    assert {room: failure.code for room, failure in endings.items() if failure} == dict.fromkeys(
        (1, 2, 3), FailureCode.ABORTED
    )


def test_a_deadline_ends_a_request(engine: Engine) -> None:
    engine.start(1, [1, 2, 3], max_tokens=100, deadline_s=5.0)
    engine.step()
    assert engine.core.next_deadline_s() == 5.0
    engine.now_s = 5.0
    engine.step()
    failure = engine.outputs[1][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.DEADLINE


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), (list(range(300)), "300 tokens"), ([VOCAB], "vocabulary")]
)
def test_a_request_that_can_never_work_is_refused(engine: Engine, prompt: list[int], words: str) -> None:
    engine.start(1, prompt, max_tokens=1)
    engine.run()
    failure = engine.outputs[1][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.INVALID
    assert words in failure.message


def test_what_is_beyond_the_longest_queue_is_turned_away_and_the_rest_served(new_engine: NewEngine) -> None:
    engine = new_engine(max_requests=1, scheduling=Scheduling(max_waiting=2))
    for room in range(1, 6):
        engine.start(room, [room], max_tokens=4)
    engine.run()
    failures = {room: engine.outputs[room][-1].failure for room in range(1, 6)}
    assert [failures[room] for room in (1, 2, 3)] == [None] * 3
    assert {failures[room].code for room in (4, 5)} == {FailureCode.OVERLOADED}


def test_prompts_that_wait_are_told_until_they_are_computed(new_engine: NewEngine) -> None:
    engine = new_engine(max_requests=2)
    for room in range(1, 4):  # one more than there are rows
        engine.start(room, [room] * 10, max_tokens=3)
    told = [engine.core.load()]
    while engine.step():
        told.append(engine.core.load())
    assert [(load.num_waiting_prompts, load.waiting_tokens) for load in (told[0], told[-1])] == [(3, 30), (0, 0)]
    assert all(load.num_waiting_prompts == load.num_waiting for load in told)


def test_learned_lengths_keep_requests_from_being_retracted(new_engine: NewEngine) -> None:
    """Each needs 11 of 23 pages in the end, and 2 at first: three at once would be too many."""
    engine = new_engine(num_pages=24)
    for room in range(1, 9):
        engine.start(room, [room] * 8, max_tokens=36)
    most = 0
    while engine.step():
        most = max(most, engine.core.load().num_running)
    assert most == 2


def test_output_ends_when_the_context_is_full(new_engine: NewEngine) -> None:
    engine = new_engine(num_pages=128)
    prompt = [i % 50 for i in range(250)]
    engine.start(1, prompt, max_tokens=6)
    engine.run()
    assert len(engine.tokens(1)) == 6
    assert engine.outputs[1][-1].finish is Finish.LENGTH


@pytest.mark.parametrize("seed", range(8))
def test_a_random_workload_on_a_tiny_pool_answers_everything_correctly(new_engine: NewEngine, seed: int) -> None:
    rng = random.Random(seed)
    engine = new_engine(num_pages=24, max_step_tokens=rng.choice([3, 16, 64]), max_requests=4)
    prompts: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    aborted: set[int] = set()
    for room in range(1, 60):
        shared = [5] * rng.randrange(0, 20)
        prompts[room] = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        lengths[room] = rng.randrange(1, 40)
        engine.start(room, prompts[room], lengths[room])
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            victim = rng.randrange(1, room + 1)
            aborted.add(victim)
            engine.abort(victim)
    engine.run()
    for room, prompt in prompts.items():
        last = engine.outputs[room][-1]
        assert (last.finish is None) != (last.failure is None)
        if last.failure is None:
            assert engine.tokens(room) == expected_output(prompt, lengths[room], VOCAB)
        else:
            assert room in aborted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_step_tokens", [16, 100, 2048])
def test_equal_prompts_that_come_together_are_computed_once(
    new_engine: NewEngine, overlap: bool, max_step_tokens: int
) -> None:
    engine = new_engine(512, max_step_tokens, 16, overlap=overlap)
    prompt = list(range(200))
    requests = [engine.start(room, prompt, 9) for room in range(1, 17)]
    most_held = 0
    while engine.step():
        most_held = max(most_held, engine.cache.pool.capacity - engine.cache.pool.num_free)
    assert all(engine.tokens(request.room) == expected_output(prompt, 9, VOCAB) for request in requests)
    num_computed = sum(200 - engine.outputs[request.room][-1].stats.cached_tokens for request in requests)
    not_worth_waiting = STEP_COST // 2  # of the last chunk, in what is left of its step
    assert num_computed <= 200 + 16 * PAGE + not_worth_waiting
    assert most_held <= 200 // PAGE + 16 * 3  # the last page of the prompt, and two of the output


class PoisonedRunner(NullRunner):
    """Has no token for a request with a poisoned entry."""

    POISON = np.uint64(0xBAD)

    def __init__(self, num_pages: int) -> None:
        self.kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        super().__init__(self.kv, VOCAB)

    def logits(self, batch: ForwardBatch) -> list[int]:
        tokens = super().logits(batch)
        for sample, row in enumerate(batch.rows_of(batch.sampled_tokens).tolist()):
            pages = batch.page_table[row][: -(-int(batch.seq_lens[row]) // PAGE)]
            if (self.kv[pages] == self.POISON).any():
                tokens[sample] = NO_TOKEN
        return tokens


def test_a_poisoned_prefix_whose_maker_has_left_is_forgotten_when_it_shows(new_engine: NewEngine) -> None:
    """Its maker was aborted before it had a token, so only those who read it can tell."""
    runner = PoisonedRunner(64)
    engine = new_engine(64, 16, 8, runner=runner)
    prompt = list(range(40))
    first = engine.start(1, prompt, 5)
    assert engine.step()
    runner.kv[engine.cache.pages_of(first)[1], 2] = runner.POISON
    engine.abort(1)
    engine.start(2, prompt, 5)
    engine.run()
    assert engine.outputs[2][-1].failure.code is FailureCode.INTERNAL
    engine.start(3, prompt, 5)
    engine.run()
    assert engine.tokens(3) == expected_output(prompt, 5, VOCAB)


def test_a_request_that_fails_later_takes_only_its_own_from_others(new_engine: NewEngine) -> None:
    runner = PoisonedRunner(64)
    engine = new_engine(64, 64, 8, runner=runner)
    prompt = list(range(40))
    engine.start(1, prompt, 5)
    engine.run()
    second = engine.start(2, [*prompt, *range(500, 508)], 9)
    while len(engine.tokens(2)) < 3:
        engine.step()
    runner.kv[engine.cache.pages_of(second)[11], 0] = runner.POISON
    engine.run()
    assert engine.outputs[2][-1].failure.code is FailureCode.INTERNAL
    third = engine.start(3, [*prompt, *range(500, 510)], 2)
    assert engine.cache.cached_len(third) == 40
    engine.run()
