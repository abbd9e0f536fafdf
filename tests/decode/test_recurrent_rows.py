"""Drafts for models with recurrent layers: the same tokens, scores and ends, whatever happens to a request."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from draft_scenes import FEW_PAGES, NewEngine, Serving, TwoRanks

from diptych.checkpoints.source import ModelSource, open_model
from diptych.tokens.tokenizer import Tokenizer


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
