"""Drafts for models with recurrent layers: the same tokens, scores and ends, whatever happens to a request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_scenes import FEW_PAGES, NewEngine, Serving, TwoRanks
from every_kind import Scripted
from recurrent_runner import expected_output
from stepped_engine import PAGE, VOCAB, Engine

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.attention.staged_batch import Trials
from diptych.engine.models.layers.recurrent import trials as row_trials
from diptych.engine.runner import states
from diptych.engine.schedule import running, sampled
from diptych.engine.values.request import Request
from diptych.tokens.tokenizer import Tokenizer

PER_STATE, NUM_TOKENS = 2, 30
PROMPTS = {room: [*range(13), *[room] * (room // 4)] for room in range(1, 8)}  # the first three are the same


def expected(prompt: list[int]) -> list[int]:
    return expected_output(prompt, NUM_TOKENS, VOCAB, PER_STATE * PAGE)


def run(engine: Engine) -> dict[int, list[int]]:
    for room, prompt in PROMPTS.items():
        engine.start(room, prompt, NUM_TOKENS)
        engine.step()
    engine.run()
    return {room: engine.tokens(room) for room in PROMPTS}


@pytest.fixture
def serving(new_engine: NewEngine, tiny_recurrent_folder: Path, byte_tokenizer: Tokenizer) -> Serving:
    return Serving(new_engine, open_model(str(tiny_recurrent_folder)), byte_tokenizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_worker(serving: Serving, overlap: bool) -> None:
    answers = serving.compare(overlap=overlap)
    assert len({answer.token_ids for answer in answers.values()}) > 40


def test_retracted_requests(serving: Serving) -> None:
    serving.compare(num_pages=FEW_PAGES)
    assert serving.num_retractions > 3


def test_two_ranks(serving: Serving) -> None:
    """The other rank hears by the log how many tokens came true."""
    with ExitStack() as stack:

        def open_ranks(source: ModelSource, kv: torch.Tensor) -> TwoRanks:
            return stack.enter_context(closing(TwoRanks(source, kv)))

        serving.compare(open_runner=open_ranks)


def test_requests_that_are_replayed_in_mid_stream(serving: Serving) -> None:
    whole = serving.answers({})
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(whole[room].token_ids)}
    rest = serving.compare(said=said, overlap=True)
    assert all((*tokens, *rest[room].token_ids) == whole[room].token_ids for room, tokens in said.items())


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_that_begin_with_the_state_of_one_prompt(new_engine: NewEngine, overlap: bool) -> None:
    """The first computes it, the others find it cached; each guesses behind it."""
    answers = {room: expected(prompt) for room, prompt in PROMPTS.items()}
    engine = new_engine(drafter=Scripted(answers), overlap=overlap, pages_per_state=PER_STATE, num_pages=128)
    assert run(engine) == answers
    stats = [engine.outputs[room][0].stats for room in PROMPTS]
    assert {each.cached_tokens for each in stats[2:] if each} == {12}


# mistakes


def too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is advanced by a draft that did not come true."""
    planted(monkeypatch, lambda drafts, token_ids: min(1 + len(drafts), len(token_ids) + 1))


def too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda drafts, token_ids: len(token_ids) - 1)


def planted(monkeypatch: pytest.MonkeyPatch, late_len: Callable[[Any, Any], int]) -> None:
    real = sampled._roll_back

    def mutant(request: Request, drafts: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        real(request, drafts, token_ids)
        request.late_len = late_len(drafts, token_ids) if drafts else 0

    monkeypatch.setattr(sampled, "_roll_back", mutant)


def told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came true is told with the step behind the next one, too."""

    def begun(decodes: list[Request]) -> list[Request]:
        return [request for request in decodes if request.state_from is not None]

    monkeypatch.setattr(running, "_begin_states", begun)


@pytest.mark.parametrize("mutate", [too_many, too_few, told_twice])
def test_a_state_that_saw_another_number_of_tokens_changes_answers(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    answers = {room: expected(prompt) for room, prompt in PROMPTS.items()}
    engine = new_engine(drafter=Scripted(answers), pages_per_state=PER_STATE, num_pages=128)
    assert run(engine) != answers


def of_an_earlier_row(trials: Trials) -> Trials:
    """What the newest row was given is not kept: what lies there is an older one's."""
    return replace(trials, places=trials.places[:0], tokens=trials.tokens[:0])


def of_another_request(trials: Trials) -> Trials:
    shifted = [replace(turn, tokens=turn.tokens.roll(1)) for turn in trials.late]
    return replace(trials, late=shifted)


def seen_at_once(trials: Trials) -> Trials:
    """Rows are tried on the states themselves: a wrong guess stays in them."""
    own = [replace(turn, batch=replace(turn.batch, state_slots=trials.slots)) for turn in trials.rows]
    return replace(trials, others=[*trials.others, *own], rows=[])


def never_seen(trials: Trials) -> Trials:
    return replace(trials, late=[])


@pytest.mark.parametrize("mutate", [of_an_earlier_row, of_another_request, seen_at_once, never_seen])
def test_a_state_that_saw_other_tokens_changes_answers(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[Trials], Trials]
) -> None:
    rooms = range(1, 7)
    plain = serving.answers({}, rooms=rooms)
    told = {room: answer.token_ids for room, answer in plain.items()}
    real = row_trials.new_trials

    def mutant(*args: Any, **options: Any) -> Trials | None:
        trials = real(*args, **options)
        return trials and mutate(trials)

    monkeypatch.setattr(states, "new_trials", mutant)
    assert serving.answers(told, rooms=rooms) != plain
