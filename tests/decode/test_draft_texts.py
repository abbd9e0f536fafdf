"""What a client reads of several choices, up to stop strings, is the same with drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from draft_scenes import NUM_PAGES, NewEngine, Rows, one_rank
from every_kind import Scripted
from stepped_engine import PAGE

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.generation.finish import Finish
from diptych.generation.output import Output
from diptych.generation.output_text import OutputText
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

CHOICES = range(1, 6)  # of one request: they differ in their seeds alone
NUM_TOKENS = 30
PROMPT = list(range(20, 31))
LETTERS = tuple(range(40, 90))  # that text is made of
Read = tuple[str, list[int], Finish | None, str]  # text, tokens, how it ended, and by which stop string
Outputs = dict[int, list[Output]]


def params_of(choice: int) -> SamplingParams:
    return SamplingParams(NUM_TOKENS, 0.9, seed=choice, ignore_eos=True, allowed_token_ids=LETTERS)


@pytest.fixture
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


def served(
    new_engine: NewEngine, source: ModelSource, told: Mapping[int, Sequence[int]], overlap: bool
) -> tuple[Outputs, int]:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    rows = Rows(one_rank(source, torch.full(layout.shape, torch.nan)))
    vocab_size = source.config.vocab_size
    engine = new_engine(
        drafter=Scripted(told), overlap=overlap, runner=rows, vocab_size=vocab_size, num_pages=NUM_PAGES
    )
    for choice in CHOICES:
        engine.start_with(choice, PROMPT, params_of(choice))
    engine.run()
    return {choice: engine.outputs[choice] for choice in CHOICES}, rows.num_rows


def read(tokenizer: Tokenizer, outputs: Sequence[Output], stop: tuple[str, ...]) -> Read:
    """Push outputs as they came until one ends the text."""
    text = OutputText(tokenizer, SamplingParams(NUM_TOKENS, stop=stop, ignore_eos=True))
    words, token_ids = "", list[int]()
    for output in outputs:
        delta = text.push(output.token_ids, output.finish, output.logprobs)
        words += delta.text
        token_ids += delta.token_ids
        if delta.finish is not None:
            return words, token_ids, delta.finish, delta.stop
    raise AssertionError("it did not end")


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_and_where_stop_strings_end_them(
    new_engine: NewEngine, source: ModelSource, byte_tokenizer: Tokenizer, overlap: bool
) -> None:
    """Stop strings of one, two and three characters at every place: most end in the midst of a row."""
    plain, _ = served(new_engine, source, {}, overlap)
    told = {choice: [token for output in plain[choice] for token in output.token_ids] for choice in CHOICES}
    drafted, num_rows = served(new_engine, source, told, overlap)
    assert num_rows > 10
    assert len({tuple(tokens) for tokens in told.values()}) == len(CHOICES)
    for choice in CHOICES:
        assert max(len(output.token_ids) for output in drafted[choice]) > 1
        whole, *_ = read(byte_tokenizer, plain[choice], ())
        for at in range(len(whole) - 2):
            stop = (whole[at : at + 1 + at % 3],)
            expected = read(byte_tokenizer, plain[choice], stop)
            assert read(byte_tokenizer, drafted[choice], stop) == expected
            assert (expected[2], expected[3]) == (Finish.STOP, *stop)
