"""Gemma 3 with images: rows of an image see each other, so a step has all of one; logits and tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from kernel_device import device
from tiny_vision import VisionModel, contents_of, picture
from vision_engine import GREEDY, NUM_OUTPUTS, NUM_PAGES, PAGE_SIZE, VisionEngine, request_of, runner_of, seen

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.runner import backends
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.engine.values.batch import ForwardBatch, ImageCounts, ImageRows
from diptych.generation.output import FailureCode
from diptych.v1 import rank_pb2

__all__ = ["device"]
SQUARES: Final = seen(picture(0, 4, 4), picture(1, 4, 4))  # of 16 places each: windows are of 11


@pytest.fixture(scope="module")
def source(gemma3_vision: VisionModel) -> ModelSource:
    return open_model(str(gemma3_vision.folder))


@pytest.fixture(scope="module")
def expected(gemma3_vision: VisionModel) -> tuple[list[int], Any]:
    """What transformers says behind the prompt with two images, and its logits there."""
    tokens = gemma3_vision.greedy(SQUARES, NUM_OUTPUTS)
    return tokens, gemma3_vision.logits([*SQUARES, *tokens[:-1]])[-NUM_OUTPUTS:]


def assert_has_images_whole(batch: ForwardBatch) -> None:
    assert all(each.first + each.num_rows == 16 for each in batch.images)


@pytest.mark.parametrize(
    ("backend", "step_tokens", "chunks"),
    [
        ("cpu", 64, [43]),
        ("cpu", 23, [23, 20]),
        ("cpu", 17, [4, 17, 2, 17, 3]),
        ("torch", 64, [43]),
        ("torch", 19, [4, 19, 19, 1]),
    ],
)
def test_a_prompt_with_two_images_gives_the_logits_and_tokens_of_transformers_in_chunks_that_hold_them_whole(
    source: ModelSource, expected: Any, backend: str, step_tokens: int, chunks: list[int]
) -> None:
    engine = VisionEngine(source, runner_of(source, attention_backend=backend)[1], step_tokens)
    tokens, logits = expected
    assert engine.run(request_of(1, SQUARES))[1] == tokens
    torch.testing.assert_close(torch.stack(engine.logits[1]), logits, atol=1e-3, rtol=1e-4)
    assert [int(batch.extend_lens.sum()) for batch in engine.batches][: len(chunks)] == chunks
    for batch in engine.batches:
        assert_has_images_whole(batch)
    assert engine.runner.image_counts == ImageCounts(num_encoded=2, num_rows=32)


def test_kernels_of_gpus_give_the_logits_of_transformers(
    gemma3_vision: VisionModel, source: ModelSource, device: torch.device
) -> None:
    """An image behind a few tokens, of which windows see some, and a token behind it."""
    prompt: list[Any] = [5, 6, 7, 8, picture(2, 4, 4), 9]
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan, device=device)
    runner = ModelRunner(source, kv, dtype="float32", max_requests=16, attention_backend="triton")
    engine = VisionEngine(source, runner)
    tokens = engine.run(request_of(1, prompt, replace(GREEDY, max_tokens=1)))[1]
    logits = gemma3_vision.logits(prompt)[-1:]
    torch.testing.assert_close(torch.stack(engine.logits[1]).cpu(), logits, atol=1e-3, rtol=1e-4)
    assert tokens == logits.argmax(-1).tolist()


def test_flashinfer_is_refused_because_it_lets_no_row_see_what_is_behind_it(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_check_gpu", lambda name, setting: None)
    with pytest.raises(ConfigError, match="images whose rows see each other, which this model has; use 'triton'"):
        runner_of(source, attention_backend="flashinfer")


@pytest.mark.parametrize("num_tokens", range(4))
def test_a_prefix_that_ends_anywhere_in_an_image_goes_on_inside_it_and_encodes_nothing(
    gemma3_vision: VisionModel, source: ModelSource, num_tokens: int
) -> None:
    """Its keys were made by a step that had all of the image. A second image begins in another place of a page."""
    engine = VisionEngine(source, runner_of(source)[1], 18)
    image = picture(3, 4, 4)
    before: list[Any] = [*range(30, 30 + num_tokens), image]
    first, other = [*before, 40, 41], [*before, 50, 41]
    for room, prompt in enumerate((first, other, first), 1):
        assert engine.run(request_of(room, prompt))[room] == gemma3_vision.greedy(prompt, NUM_OUTPUTS)
        for batch in engine.batches:
            assert_has_images_whole(batch)
    assert engine.runner.image_counts.num_encoded == 1


def test_requests_with_images_and_without_share_steps(gemma3_vision: VisionModel, source: ModelSource) -> None:
    engine = VisionEngine(source, runner_of(source)[1], 37)
    prompts = {1: SQUARES, 2: [9, 8, 7, 6, 5], 3: seen(picture(5, 4, 4)), 4: [4, 4, picture(0, 4, 4)]}
    found = engine.run(*(request_of(room, prompt) for room, prompt in prompts.items()))
    assert found == {room: gemma3_vision.greedy(prompt, NUM_OUTPUTS) for room, prompt in prompts.items()}


def test_rows_that_see_nothing_behind_them_do_not_give_these_logits(
    source: ModelSource, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForwardBatch, "seen_ends", property(lambda batch: batch.positions + 1))
    for backend in ("cpu", "torch"):
        engine = VisionEngine(source, runner_of(source, attention_backend=backend)[1])
        engine.run(request_of(1, SQUARES))
        assert (torch.stack(engine.logits[1])[0] - expected[1][0]).abs().max() > 1e-2


def test_an_image_of_another_size_or_larger_than_a_step_is_refused(source: ModelSource) -> None:
    engine = VisionEngine(source, runner_of(source)[1], 15)
    refused: list[tuple[int, list[Any], str]] = [
        (1, [1, picture(0, 2, 2), 2], "an image has 32 by 32 pixels, not 16 and 16"),
        (2, [1, picture(0, 4, 4), 2], "an image takes 16 places, whose rows see each other: a step of this worker"),
    ]
    for room, prompt, words in refused:
        engine.run(request_of(room, prompt))
        assert engine.failures[room].code is FailureCode.INVALID
        assert words in engine.failures[room].message


def test_two_ranks_compute_what_one_does_by_steps_that_come_over_the_log(
    source: ModelSource, on_ranks: Callable[..., Any]
) -> None:
    engine = VisionEngine(source, runner_of(source)[1], 23)
    engine.run(request_of(1, SQUARES))
    steps = [step_to_wire(batch).SerializeToString() for batch in engine.batches]

    def compute(communicator: Any) -> Any:
        config = ModelPart.of(source, communicator).config
        kv = torch.zeros(
            ModelRunner.pool_layout(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32").shape
        )
        part = ModelRunner(source, kv, dtype="float32", communicator=communicator, max_requests=16)
        return torch.cat([part.logits(step_from_wire(rank_pb2.Step.FromString(step))) for step in steps])

    together = on_ranks(2, compute, SumRule(2, 0))
    torch.testing.assert_close(together, torch.stack(engine.logits[1]), atol=1e-4, rtol=1e-4)


def test_rows_are_those_of_the_tower_when_pages_carry_them(source: ModelSource) -> None:
    images, content = runner_of(source)[1].model.images, contents_of(SQUARES)[0]
    assert images is not None
    assert content.image is not None
    assert source.config.vision is not None
    pages = np.arange(3, 20, dtype=np.int32)
    image = ImageRows(b"a", content.image, 0, 16, 0)
    with torch.inference_mode():
        made = images.of_step((image,), torch.device("cpu"))
        images.write((replace(image, pages=pages),))
        images.forget()
        read = images.of_step((replace(image, pages=pages),), torch.device("cpu"))
        assert images.encode_extremes(source.config.vision).shape == (1, 16, 64)
    assert torch.equal(read.rows, made.rows)
