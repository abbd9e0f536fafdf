"""Drafts under grammars, end to end: what is forced comes at once, and what fails does so as without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from bombs import ambiguous
from draft_scenes import NUM_PAGES, NewEngine, Rows, one_rank
from every_kind import Answer
from stepped_engine import PAGE, Engine

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.drafting.forced import ForcedSource
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.running import Drafter
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.generation.grammar import Grammar, num_words
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.grammars.matcher import CompiledGrammar
from diptych.grammars.source import source_of
from diptych.tokens.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 6}, "is_active": {"type": "boolean"}},
    "required": ["first_name", "is_active"],
    "additionalProperties": False,
}
ROOMS = range(1, 5)
PROMPT = [3, 4, 5]


class ForcedDrafter(Drafter):
    """Guesses what grammars force."""

    def __init__(self, vocab_size: int) -> None:
        self._source = ForcedSource(vocab_size)

    def propose(self, requests: Sequence[Request]) -> Drafts:
        guesses = {request.room: self._source.guess(request, 8).token_ids for request in requests}
        return {room: guess for room, guess in guesses.items() if guess}


class Repeated(Drafter):
    """Guesses one token, again and again."""

    def __init__(self, token_id: int, count: int) -> None:
        self._guess = (token_id,) * count

    def propose(self, requests: Sequence[Request]) -> Drafts:
        return {request.room: self._guess for request in requests}


class StrictCompiler:
    """Its matchers fail early, by a quarter of what a mask may need."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocabulary = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=[0])
        self._num_words = num_words(vocab_size)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        limits = llguidance.LLParserLimits(step_max_items=1000, verbose_errors=False)
        start = llguidance.LLMatcher(self._vocabulary, source_of(grammar), log_level=0, limits=limits)
        return CompiledGrammar(start, self._num_words, self._vocabulary)


@pytest.fixture
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


def engine_of(new_engine: NewEngine, source: ModelSource, compiler: Any, **options: Any) -> tuple[Engine, Rows]:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    rows = Rows(one_rank(source, torch.full(layout.shape, torch.nan)))
    vocab_size = source.config.vocab_size
    return new_engine(runner=rows, vocab_size=vocab_size, num_pages=NUM_PAGES, compiler=compiler, **options), rows


@pytest.mark.parametrize("overlap", [False, True])
def test_names_of_a_schema_come_at_once_and_answers_are_the_same(
    new_engine: NewEngine, source: ModelSource, byte_tokenizer: Tokenizer, overlap: bool
) -> None:
    vocab_size = source.config.vocab_size
    compiler = Compiler(byte_tokenizer, vocab_size, [0])

    def answers(drafter: Drafter | None) -> tuple[dict[int, Answer], int, int]:
        engine, rows = engine_of(new_engine, source, compiler, drafter=drafter, overlap=overlap)
        for room in ROOMS:
            params = SamplingParams(120, 0.9 * (room % 2), seed=room, grammar=Grammar.from_schema(SCHEMA))
            engine.start_with(room, [*PROMPT, room], params)
        engine.run()
        return {room: Answer.of(engine.outputs[room]) for room in ROOMS}, engine.num_steps, rows.num_rows

    plain, num_steps, _ = answers(None)
    guessed, num_guessed_steps, num_rows = answers(ForcedDrafter(vocab_size))
    assert guessed == plain
    assert all('"is_active"' in byte_tokenizer.decode(answer.token_ids) for answer in plain.values())
    assert num_rows > len(ROOMS)
    assert num_guessed_steps < num_steps - 10


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8])
def test_an_output_whose_masks_need_too_much_fails_with_drafts_as_without(
    new_engine: NewEngine, source: ModelSource, byte_tokenizer: Tokenizer, num_drafts: int
) -> None:
    """A mask that could not be computed allows an end of the sequence alone, which is no end of the output."""
    compiler = StrictCompiler(byte_tokenizer, source.config.vocab_size)
    (token,) = byte_tokenizer.encode("a")

    def outcome(drafter: Drafter | None) -> tuple[list[int], str]:
        engine, _ = engine_of(new_engine, source, compiler, drafter=drafter)
        params = SamplingParams(60, 0.0, logit_bias={token: 90.0}, grammar=ambiguous(3))
        engine.start_with(1, PROMPT, params)
        engine.run()
        failure = engine.outputs[1][-1].failure
        assert failure is not None, "it ended well"
        return engine.tokens(1), failure.message

    plain = outcome(None)
    assert "Too many items" in plain[1]
    assert len(plain[0]) == 9
    assert outcome(Repeated(token, num_drafts)) == plain
