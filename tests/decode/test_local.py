"""Requests that a decode worker computes by itself, from their prompt on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from null_runner import expected_output
from stepped_engine import PAGE, VOCAB, Engine

from diptych.common.members.roles import LegKind
from diptych.engine.values.events import AbortRoom, CompileGrammar, Emit, Event, GrammarFailed, Start
from diptych.engine.values.limits import Scheduling
from diptych.engine.values.prompt_cost import STEP_COST
from diptych.engine.values.request import new_request
from diptych.engine.values.step import PlainSteps
from diptych.generation.finish import Finish
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import Failure, FailureCode, Output
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, prompt_keys

NewEngine = Callable[..., Engine]


@pytest.mark.parametrize("prompt_len", [1, PAGE, PAGE + 1, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_output_is_what_the_model_says_for_any_prompt_length(
    new_engine: NewEngine, prompt_len: int, overlap: bool
) -> None:
    engine = new_engine(overlap=overlap)
    prompt = list(range(1, prompt_len + 1))
    engine.start(1, prompt, max_tokens=9)
    engine.run()
    assert engine.tokens(1) == expected_output(prompt, 9, VOCAB)
    assert [output.first_index for output in engine.outputs[1]] == list(range(9))
    assert engine.outputs[1][-1].finish is Finish.LENGTH


def test_a_first_token_that_is_the_last_ends_the_request_with_its_measurements(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.start(1, list(range(10)), max_tokens=1)
    engine.run()
    (output,) = engine.outputs[1]
    assert (output.first_index, output.finish) == (0, Finish.LENGTH)
    assert output.stats is not None


def test_its_second_token_is_of_the_steps_that_can_be_told_beforehand(new_engine: NewEngine) -> None:
    engine = new_engine()
    request = engine.start(1, list(range(10)), max_tokens=9)
    engine.step()
    assert len(engine.tokens(1)) == 1
    assert engine.core.plain_steps(7) == PlainSteps(9 - 2, (request,)), "all but the first and the last"


def test_a_cached_prefix_is_not_computed_again(new_engine: NewEngine) -> None:
    engine = new_engine()
    prompt = list(range(50))
    for room in (1, 2):
        engine.start(room, prompt, max_tokens=3)
        engine.run()
    assert engine.tokens(2) == expected_output(prompt, 3, VOCAB)
    stats = [output.stats and output.stats.cached_tokens for output in engine.outputs[2]]
    assert stats == [48, None, 48], "the first says it already: a client may stop before the last"


def test_a_retracted_request_ends_the_same(new_engine: NewEngine) -> None:
    engine = new_engine(num_pages=12)
    engine.expect_short_outputs()
    prompts = {room: [room] * 10 for room in (1, 2, 3)}
    for room, prompt in prompts.items():
        engine.start(room, prompt, max_tokens=20)
    engine.run()
    assert engine.core.report().counts.retractions > 0
    assert [engine.tokens(room) for room in prompts] == [expected_output(p, 20, VOCAB) for p in prompts.values()]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_answers_and_gives_everything_back_at_any_time(new_engine: NewEngine, num_steps: int) -> None:
    engine = new_engine()
    engine.start(1, list(range(40)), max_tokens=5)  # three steps until its first token
    for _ in range(num_steps):
        engine.step()
    engine.abort(1)
    engine.run()
    failure = engine.outputs[1][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.ABORTED


def test_a_deadline_ends_a_request(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.start(1, list(range(40)), max_tokens=50, deadline_s=1.0)
    engine.step()
    engine.now_s = 1.0
    engine.run()
    failure = engine.outputs[1][-1].failure
    assert failure is not None
    assert failure.code is FailureCode.DEADLINE


def test_what_is_beyond_the_longest_queue_is_turned_away(new_engine: NewEngine) -> None:
    engine = new_engine(num_pages=8, scheduling=Scheduling(max_waiting=2))
    for room in range(1, 6):
        engine.start(room, [room] * 20, max_tokens=3)
    refused = [room for room in range(1, 6) if engine.outputs[room] and engine.outputs[room][-1].failure]
    engine.run()
    assert refused == [4, 5]
    assert all(engine.tokens(room) == expected_output([room] * 20, 3, VOCAB) for room in (1, 2, 3))


@pytest.mark.parametrize(
    ("event", "code"),
    [(GrammarFailed(1, "no such rule"), FailureCode.INVALID), (AbortRoom(1, "no such rule"), FailureCode.ABORTED)],
    ids=["it can't be compiled", "the client leaves"],
)
def test_a_request_holds_nothing_while_its_grammar_is_compiled(
    new_engine: NewEngine, event: Event, code: FailureCode
) -> None:
    engine = new_engine()
    core = engine.core
    grammar = Grammar(GrammarKind.REGEX, "a+")
    params = SamplingParams(max_tokens=3, temperature=0.0, grammar=grammar)
    core.handle(Start(new_request(1, np.arange(5), params), kind=LegKind.LOCAL), 0.0)
    assert core.pop_effects() == [CompileGrammar(1, grammar, ())]
    assert core.plan(0.0) is None
    assert engine.cache.pool.counts()["owned"] == 0
    core.handle(event, 0.0)
    assert core.pop_effects() == [Emit(Output(1, failure=Failure(code, "no such rule")))]


def cached_tokens(engine: Engine, room: int) -> int:
    stats = engine.outputs[room][-1].stats
    assert stats is not None
    return stats.cached_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_prompts_that_come_together_are_computed_once(new_engine: NewEngine, overlap: bool) -> None:
    engine = new_engine(num_pages=512, max_step_tokens=64, max_requests=16, overlap=overlap)
    prompt = list(range(200))
    for room in range(1, 17):
        engine.start(room, prompt, 9)
    most_held = 0
    while engine.step():
        most_held = max(most_held, engine.cache.pool.capacity - engine.cache.pool.num_free)
    assert all(engine.tokens(room) == expected_output(prompt, 9, VOCAB) for room in range(1, 17))
    num_computed = sum(200 - cached_tokens(engine, room) for room in range(1, 17))
    not_worth_waiting = STEP_COST // 2  # of the last chunk, in what is left of its step
    assert num_computed <= 200 + 16 * PAGE + not_worth_waiting
    assert most_held <= 200 // PAGE + 16 * 3


@pytest.mark.parametrize("num_steps", range(0, 7, 2))
def test_those_that_wait_go_on_when_the_one_that_computes_ends(new_engine: NewEngine, num_steps: int) -> None:
    engine = new_engine(num_pages=512, max_step_tokens=32)
    prompt = list(range(200))
    for room in range(1, 4):
        engine.start(room, prompt, 3)
    for _ in range(num_steps):
        engine.step()
    assert engine.core.load().num_ungranted == 2  # they hold nothing
    engine.abort(1)
    engine.run()
    assert all(engine.tokens(room) == expected_output(prompt, 3, VOCAB) for room in (2, 3))
    num_computed = sum(200 - cached_tokens(engine, room) for room in (2, 3))
    assert num_computed <= 200 - 32 * num_steps + 2 * PAGE + STEP_COST // 2


def test_content_is_refused_by_a_model_that_takes_text_only(new_engine: NewEngine) -> None:
    engine, contents = new_engine(), [ContentSegment(1, 2, bytes(32))]
    engine.start(1, prompt_keys(np.arange(5), contents).tolist(), 3, contents=contents)
    (output,) = engine.outputs[1]
    words = "the prompt has content that is no text; this model takes text only"
    assert output.failure == Failure(FailureCode.INVALID, words)
