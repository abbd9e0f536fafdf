"""With drafts and without, whatever a request asks for and whatever happens to it: the same tokens, scores and ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_scenes import FEW_PAGES, ROOMS, NewEngine, Serving, TwoRanks
from every_kind import KINDS

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.runner.model_runner import ModelRunner
from diptych.tokens.tokenizer import Tokenizer


@pytest.fixture
def serving(new_engine: NewEngine, tiny_folder: Path, byte_tokenizer: Tokenizer) -> Serving:
    return Serving(new_engine, open_model(str(tiny_folder)), byte_tokenizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_worker(serving: Serving, overlap: bool) -> None:
    answers = serving.compare(overlap=overlap)
    assert len(ROOMS) >= 2 * len(KINDS)
    assert (serving.num_early > 20) == overlap, "guesses were made behind tokens on their way"
    assert len({answer.finish for answer in answers.values()}) == 2, "some end by a stop, some by their length"
    assert len({answer.token_ids for answer in answers.values()}) > 40


def test_retracted_requests(serving: Serving) -> None:
    serving.compare(num_pages=FEW_PAGES)
    assert serving.num_retractions > 3


def test_pages_that_come_back_from_host_memory(serving: Serving) -> None:
    serving.compare(num_pages=FEW_PAGES, num_slots=64, overlap=True)
    assert serving.num_restored > 3


def test_adapters(serving: Serving, tmp_path: Path, write_adapter: Callable[..., Any]) -> None:
    """Two adapters and the model itself share steps."""
    width, source = 64, serving.source
    shapes = {f"model.layers.{layer}.self_attn.{name}_proj": (width, width) for layer in (0, 1) for name in ("q", "o")}
    for slot in (0, 1):
        write_adapter(tmp_path / str(slot), shapes, seed=slot)

    def install(runner: ModelRunner) -> None:
        for slot in (0, 1):
            adapter = read_adapter(tmp_path / str(slot), FAMILIES["llama"].placement(source.config))
            runner.loras.install(slot, runner.loras.prepare(adapter))

    def fields(room: int) -> dict[str, Any]:
        return {"adapter": room % 3 - 1, "extra_key": bytes([room % 3])}

    assert serving.compare(prepare=install, fields=fields, overlap=True) != serving.answers({})


def test_requests_that_are_replayed_in_mid_stream(serving: Serving) -> None:
    whole = serving.answers({})
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(whole[room].token_ids)}
    rest = serving.compare(said=said, overlap=True)
    for room, tokens in said.items():
        assert (*tokens, *rest[room].token_ids) == whole[room].token_ids
        assert rest[room].finish == whole[room].finish
        assert rest[room].logprobs == whole[room].logprobs[len(tokens) :]


@pytest.mark.parametrize("folder", ["tiny_latent_folder", "tiny_sparse_folder"])
def test_latents(new_engine: NewEngine, byte_tokenizer: Tokenizer, request: pytest.FixtureRequest, folder: str) -> None:
    source = open_model(str(request.getfixturevalue(folder)))
    Serving(new_engine, source, byte_tokenizer).compare(num_pages=FEW_PAGES)


def test_two_ranks(serving: Serving) -> None:
    """The other rank hears of steps by the log, and of no draft beside."""
    with ExitStack() as stack:

        def open_ranks(source: ModelSource, kv: torch.Tensor) -> TwoRanks:
            return stack.enter_context(closing(TwoRanks(source, kv)))

        answers = serving.compare(open_runner=open_ranks)
    assert len({answer.token_ids for answer in answers.values()}) > 40
