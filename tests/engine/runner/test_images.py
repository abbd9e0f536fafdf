"""Prompts with images on one worker: what transformers computes, however they are cut, cached and shared out."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import on_stages
from tiny_vision import picture
from vision_engine import NUM_OUTPUTS, TWO_IMAGES, VisionEngine, request_of, runner_of, seen, without_images

from diptych.architectures.size import num_parameters
from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.common.errors import ConfigError
from diptych.engine.lora.registry import InvalidAdapter
from diptych.engine.models.adapters.lora_host import LoraHost
from diptych.engine.models.decoder import Decoder
from diptych.engine.runner.encoded_images import EncodedImages
from diptych.engine.runner.in_place import PartsInPlace
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.engine.values.batch import ForwardBatch, ImageCounts, ImageRows
from diptych.v1 import rank_pb2

NO_POOL = torch.zeros(1, 8)


@pytest.fixture(scope="module")
def source(vision_model: Any) -> ModelSource:
    return open_model(str(vision_model.folder))


@pytest.fixture(scope="module")
def expected(vision_model: Any) -> tuple[list[int], Any]:
    """What transformers says behind the prompt with two images, and its logits there."""
    tokens = vision_model.greedy(TWO_IMAGES, NUM_OUTPUTS)
    return tokens, vision_model.logits([*TWO_IMAGES, *tokens[:-1]])[-NUM_OUTPUTS:]


@pytest.fixture
def runner(source: ModelSource) -> ModelRunner:
    return runner_of(source)[1]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("step_tokens", [64, 7, 3])
def test_a_prompt_with_two_images_gives_the_logits_and_tokens_of_transformers_however_it_is_cut(
    source: ModelSource, expected: Any, backend: str, step_tokens: int
) -> None:
    engine = VisionEngine(source, runner_of(source, attention_backend=backend)[1], step_tokens)
    found = engine.run(request_of(1, TWO_IMAGES))
    tokens, logits = expected
    assert found[1] == tokens
    torch.testing.assert_close(torch.stack(engine.logits[1]), logits, atol=1e-3, rtol=1e-4)
    assert engine.runner.model.images is not None
    assert engine.runner.model.images.counts == ImageCounts(num_encoded=2, num_rows=23)
    assert len(engine.batches) > 30 // step_tokens


def test_requests_with_other_images_and_without_any_share_steps(
    source: ModelSource, runner: ModelRunner, vision_model: Any, expected: Any
) -> None:
    prompts = {1: TWO_IMAGES, 2: seen(picture(5, 2, 3)), 3: [9, 8, 7, 6, 5], 4: seen(picture(6, 2, 3))}
    found = VisionEngine(source, runner, 16).run(*(request_of(room, prompt) for room, prompt in prompts.items()))
    assert found[1] == expected[0]
    assert all(found[room] == vision_model.greedy(prompts[room], NUM_OUTPUTS) for room in (2, 3, 4))


def test_an_image_that_the_prefix_cache_covers_is_not_encoded_again(
    source: ModelSource, runner: ModelRunner, expected: Any
) -> None:
    engine, images = VisionEngine(source, runner), runner.model.images
    assert images is not None
    engine.run(request_of(1, TWO_IMAGES))
    before = images.counts
    images._rows.clear()
    assert engine.run(request_of(2, TWO_IMAGES))[2] == expected[0]
    assert images.counts == before


@pytest.mark.parametrize("num_tokens", range(6))
def test_a_prefix_that_ends_anywhere_in_an_image_goes_on_inside_it(
    source: ModelSource, runner: ModelRunner, vision_model: Any, num_tokens: int
) -> None:
    """Pages of four places: how many tokens stand before says where in the image the last whole page ends."""
    engine = VisionEngine(source, runner)
    image = picture(3, 3, 4)
    first, other = ([*range(30, 30 + num_tokens), *seen(image)[3:-2], tail] for tail in (40, 50))
    engine.run(request_of(1, first))
    assert engine.run(request_of(2, other))[2] == vision_model.greedy(other, NUM_OUTPUTS)
    assert engine.runner.model.images is not None
    assert engine.runner.model.images.counts.num_encoded == 1


def test_rows_are_shared_under_one_salt_alone_and_kept_up_to_so_many_bytes(runner: ModelRunner) -> None:
    decoder = runner.model.decoder
    image = request_of(1, TWO_IMAGES).contents[0].image
    assert image is not None
    tower: Any = decoder.tower  # type: ignore[union-attr]
    row_nbytes = 4 * 64
    few = EncodedImages(lambda: tower, NO_POOL, kept_nbytes=2 * 15 * row_nbytes)

    def encode(*keys: bytes) -> int:
        few.of_step(tuple(ImageRows(key, image, 0, 15, 0) for key in keys), torch.device("cpu"))
        return few.counts.num_encoded

    assert encode(b"a", b"a") == 1
    assert encode(b"b") == 2
    assert encode(b"a") == 2
    assert encode(b"c", b"a") == 3  # for which b had to go
    assert encode(b"b") == 4


def test_rows_of_other_weights_are_encoded_anew(runner: ModelRunner) -> None:
    decoder: Any = runner.model.decoder
    images = EncodedImages(lambda: decoder.tower, NO_POOL)
    content = request_of(1, TWO_IMAGES).contents[0]
    assert content.image is not None
    rows = (ImageRows(b"", content.image, 0, 15, 0),)
    images.of_step(rows, torch.device("cpu"))
    decoder.tower = SimpleNamespace(encode=lambda image, on_layer: torch.full((1, 15, 64), 7.0))
    assert (images.of_step(rows, torch.device("cpu")).rows == 7.0).all()


def test_two_ranks_compute_what_one_does_by_steps_that_come_over_the_log(
    source: ModelSource, runner: ModelRunner, on_ranks: Callable[..., Any]
) -> None:
    engine = VisionEngine(source, runner, 16)
    engine.run(request_of(1, TWO_IMAGES))
    steps = [step_to_wire(batch).SerializeToString() for batch in engine.batches]

    def compute(communicator: Any) -> Any:
        part = on_part(source, communicator)
        return torch.cat([part.logits(step_from_wire(rank_pb2.Step.FromString(step))) for step in steps])

    together = on_ranks(2, compute, SumRule(2, 0))
    torch.testing.assert_close(together, torch.stack(engine.logits[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("model", "num_stages"), [("vision_model", 3), ("qwen3_vl", 2), ("gemma3_vision", 3)])
def test_stages_give_the_bits_of_one_process_and_the_first_alone_has_the_tower(
    model: str, num_stages: int, request: pytest.FixtureRequest
) -> None:
    """They have places on three axes, rows that are added behind several layers, and rows that see each other."""
    source = keeping_all(open_model(str(request.getfixturevalue(model).folder)))
    prompt = seen(picture(0, 4, 4), picture(1, 4, 4)) if model == "gemma3_vision" else TWO_IMAGES
    engine = VisionEngine(source, runner_of(source)[1], 19)
    engine.run(request_of(1, prompt))
    towers = []

    def compute(communicator: Any) -> Any:
        part = on_part(source, communicator)
        towers.append((communicator.stages.number, part.model.images is not None))
        return torch.cat([part.logits(step) for step in engine.batches])

    assert torch.equal(on_stages(num_stages, compute), torch.stack(engine.logits[1]))
    assert sorted(towers) == [(number, number == 0) for number in range(num_stages)]


def on_part(source: ModelSource, communicator: Any) -> ModelRunner:
    from diptych.engine.runner.model_part import ModelPart

    config = ModelPart.of(source, communicator).config
    layout = ModelRunner.pool_layout(config, num_pages=128, page_size=4, dtype="float32")
    return ModelRunner(source, torch.zeros(layout.shape), dtype="float32", communicator=communicator, max_requests=16)


def of_another(batch: ForwardBatch) -> ForwardBatch:
    """Let a step have the rows of the prompt's first image in place of all."""
    first = request_of(1, seen(picture(9, 3, 5))).contents[0]
    assert first.image is not None
    images = [replace(each, key=b"", image=first.image, first=each.first % 8) for each in batch.images]
    return replace(batch, images=tuple(images))


def shifted(batch: ForwardBatch) -> ForwardBatch:
    """Let tokens behind images stand one place further than they do."""
    if batch.rope_positions is None or batch.images:
        return batch
    return replace(batch, rope_positions=batch.rope_positions + 1)


@pytest.mark.parametrize("step_tokens", [64, 7])
def test_qwen3_vl_gives_the_logits_and_tokens_of_transformers_also_on_two_ranks(
    qwen3_vl: Any, on_ranks: Callable[..., Any], step_tokens: int
) -> None:
    """It has learned positions, and rows of its tower are added behind the first layers."""
    source, tokens = open_model(str(qwen3_vl.folder)), qwen3_vl.greedy(TWO_IMAGES, NUM_OUTPUTS)
    engine = VisionEngine(source, runner_of(source)[1], step_tokens)
    assert engine.run(request_of(1, TWO_IMAGES))[1] == tokens
    logits = qwen3_vl.logits([*TWO_IMAGES, *tokens[:-1]])[-NUM_OUTPUTS:]
    torch.testing.assert_close(torch.stack(engine.logits[1]), logits, atol=1e-3, rtol=1e-4)
    steps = list(engine.batches)

    def compute(communicator: Any) -> Any:
        part = on_part(source, communicator)
        return torch.cat([part.logits(step) for step in steps])

    torch.testing.assert_close(on_ranks(2, compute, SumRule(2, 0)), torch.stack(engine.logits[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mutant", [of_another, shifted, without_images])
def test_a_worker_with_wrong_images_or_places_does_not_give_these_logits(
    source: ModelSource, runner: ModelRunner, expected: Any, mutant: Any
) -> None:
    engine = VisionEngine(source, runner)
    engine.run(request_of(1, TWO_IMAGES), change=mutant)
    assert (torch.stack(engine.logits[1]) - expected[1]).abs().max() > 1e-2


def test_a_draft_model_is_refused_because_it_would_see_no_image(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="would see no image"):
        runner_of(source, draft=source)


def test_a_tower_whose_weights_are_replaced_in_place_encodes_with_the_new_ones(
    source: ModelSource, runner: ModelRunner, expected: Any
) -> None:
    """All images are encoded anew then; text that the prefix cache holds is another one's to forget."""
    halved = [
        (name, tensor * np.float32(0.5) if name.startswith("model.visual.blocks.0") else tensor)
        for name, tensor in as_arrays(source)
    ]
    VisionEngine(source, runner).run(request_of(1, TWO_IMAGES))
    parts = PartsInPlace(runner.model)
    parts.take(halved)
    assert parts.lacking() == []
    parts.settle()
    engine = VisionEngine(source, runner)
    engine.run(request_of(1, TWO_IMAGES))
    assert runner.image_counts.num_encoded == 4
    assert (torch.stack(engine.logits[1]) - expected[1]).abs().max() > 1e-2
    parts = PartsInPlace(runner.model)
    parts.take(source.tensors())
    parts.settle()
    engine = VisionEngine(source, runner)
    assert engine.run(request_of(1, TWO_IMAGES))[1] == expected[0]
    torch.testing.assert_close(torch.stack(engine.logits[1]), expected[1], atol=1e-3, rtol=1e-4)


def test_of_weights_that_are_released_nothing_keeps_the_tower(source: ModelSource, runner: ModelRunner) -> None:
    """Else the old tower and the new one would be in memory together."""
    VisionEngine(source, runner).run(request_of(1, TWO_IMAGES))
    decoder, images = runner.model.decoder, runner.model.images
    assert isinstance(decoder, Decoder)
    assert decoder.tower is not None
    assert images is not None
    tower = weakref.ref(decoder.tower)
    parts = PartsInPlace(runner.model)
    parts.release()
    gc.collect()
    assert tower() is None
    assert not images._rows
    parts.take(source.tensors())
    parts.settle()
    engine = VisionEngine(source, runner)
    engine.run(request_of(1, TWO_IMAGES))
    assert runner.image_counts.num_encoded == 4


def test_who_watches_a_step_hears_of_each_layer_of_the_tower(source: ModelSource) -> None:
    heard: list[None] = []
    runner = runner_of(source, on_tower_layer=lambda: heard.append(None))[1]
    VisionEngine(source, runner).run(request_of(1, TWO_IMAGES))
    assert source.config.tower is not None
    assert len(heard) == 2 * source.config.tower.num_layers


def as_arrays(source: ModelSource) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in source.tensors() if isinstance(tensor, np.ndarray)]


def test_the_weights_that_another_worker_takes_hold_the_tower(source: ModelSource, runner: ModelRunner) -> None:
    """All that is copied when a worker starts from one that runs."""
    assert runner.memory().nbytes >= 4 * num_parameters(source.config)


def test_an_adapter_changes_the_text_s_layers_and_none_changes_a_tower_s(
    source: ModelSource, vision_model: Any, write_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    """As PEFT names their modules: a prompt with images and an adapter beside one without it."""
    modules = {
        name: module.weight.shape for name, module in vision_model.theirs.named_modules() if hasattr(module, "weight")
    }
    of_text = {name: shape for name, shape in modules.items() if ".language_model." in name and name.endswith("_proj")}
    merged = copy.deepcopy(vision_model.theirs)
    for name, delta in write_adapter(tmp_path / "text", of_text).items():
        merged.get_submodule(name).weight.data += 0.3 * delta
    _, runner = runner_of(source, max_loras=2)
    host = LoraHost(source.config, Shard(0, 1), lambda: runner.loras)
    adapter = tmp_path / "text" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"lora_alpha": 8', '"lora_alpha": 2.4'))
    host.install(0, host.read(tmp_path / "text").weights)
    adapted = request_of(1, TWO_IMAGES, adapter=0, extra_key=b"the adapter's")
    found = VisionEngine(source, runner).run(adapted, request_of(2, TWO_IMAGES))
    expected = [
        replace(vision_model, theirs=theirs).greedy(TWO_IMAGES, NUM_OUTPUTS) for theirs in (merged, vision_model.theirs)
    ]
    assert [found[1], found[2]] == expected
    assert found[1] != found[2]
    of_tower = {name: shape for name, shape in modules.items() if name.endswith("visual.blocks.0.attn.proj")}
    write_adapter(tmp_path / "tower", of_tower)
    with pytest.raises(InvalidAdapter, match="the projections of attention"):
        host.read(tmp_path / "tower")
