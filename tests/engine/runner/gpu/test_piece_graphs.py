"""Recorded pieces give what the same kernels give one by one: the same bits, the same KV, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import CPU, Recorder, emulated_runner
from layer_kinds import of_each_kind
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.pieces import Pieces
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.graphs import MIB
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.piece_graphs import PieceGraphs
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows

NUM_PAGES = 64
LIMITS = StepLimits(max_step_tokens=64, max_requests=8, max_pages=NUM_PAGES)
RUNGS = (8, 16, 24)
EXTEND, MIXED, DECODE = ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE
STEPS: Sequence[tuple[ForwardMode, Mapping[int, int]]] = (  # new tokens of each request
    (EXTEND, {0: 5}),
    (EXTEND, {1: 12, 2: 4}),
    (EXTEND, {3: 19}),
    (MIXED, {0: 1, 1: 1, 4: 9}),
    (EXTEND, {5: 30}),  # more than any rung
    (EXTEND, {3: 2}),  # behind a larger one, whose states are in the padding
    (MIXED, {0: 1, 1: 1, 2: 1, 5: 21}),
    (DECODE, {0: 1, 3: 1}),
    (EXTEND, {6: 7, 2: 1}),
)
INTERPRETED = "qwen3 moe, normalised, some layers dense"
INTERPRETED_STEPS: Sequence[tuple[ForwardMode, Mapping[int, int]]] = ((EXTEND, {0: 3}), (MIXED, {0: 1, 1: 2}))
NewDriver = Callable[..., Any]


def empty_pool(source: ModelSource, communicator: Communicator | None = None) -> Tensor:
    config = ModelPart.of(source, communicator).config
    num_pages = NUM_PAGES * len(config.page_groups)
    layout = ModelRunner.pool_layout(config, num_pages=num_pages, page_size=16, dtype="float32")
    return torch.full(layout.shape, torch.nan)


def runner_on(model: LoadedModel, kv: Tensor, token_rungs: Sequence[int], **options: Any) -> GpuRunner:
    return emulated_runner(model, kv, limits_of(model), token_rungs=token_rungs, **options)


def limits_of(model: LoadedModel) -> StepLimits:
    return replace(LIMITS, num_window_groups=len(model.config.page_groups) - 1)


def batches(driver: Any, steps: Sequence[tuple[ForwardMode, Mapping[int, int]]] = STEPS) -> Iterator[ForwardBatch]:
    tokens = np.random.default_rng(5)
    for mode, lens in steps:
        yield driver.batch(mode, {request: tokens.integers(0, 97, each).tolist() for request, each in lens.items()})


def logits_of(runner: GpuRunner, steps: Sequence[ForwardBatch]) -> list[Tensor]:
    return [runner.logits(step).clone() for step in steps]


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN is what it is: a cell that nobody wrote."""
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@of_each_kind
def test_pieces_give_the_bits_of_steps_that_are_launched(new_driver: NewDriver, family_model: Any) -> None:
    source = open_model(str(family_model.folder))
    steps, (one, other) = list(batches(new_driver(source))), (empty_pool(source) for _ in range(2))
    model = load_model(source, one, ModelOptions("float32", max_requests=8))
    recorder = Recorder()
    launched, replayed = runner_on(model, one, ()), runner_on(model.on(other), other, RUNGS, recorder=recorder)
    for ours, theirs in zip(logits_of(replayed, steps), logits_of(launched, steps), strict=True):
        assert_same_bits(ours, theirs)
    assert_same_bits(other, one)
    assert (len(launched.recorded.pieces), len(replayed.recorded.pieces)) == (0, 3)
    assert recorder.captured == 3 * (1 + model.config.num_layers), "tokens, and what is before each attention"


def test_kernels_of_gpus_compute_in_pieces_what_they_compute_launched(
    new_driver: NewDriver, family_model: Any, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Interpreted for one family: some layers have experts, which padding tokens choose, too."""
    family = request.node.callspec.params["family_model"]
    if device.type == "cpu" and family != INTERPRETED:
        pytest.skip("interpreted for one family only")
    source = open_model(str(family_model.folder))
    steps = list(batches(new_driver(source), STEPS[:5] if device.type == "cuda" else INTERPRETED_STEPS))
    expected, found = (logits_of(runner_by_kernels(source, device, rungs), steps) for rungs in ((), (4,)))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def runner_by_kernels(source: ModelSource, device: torch.device, token_rungs: Sequence[int]) -> GpuRunner:
    kv = empty_pool(source).to(device)
    model = load_model(source, kv, ModelOptions("float32", attention_backend="triton", max_requests=8))
    assert model.only_queues
    if device.type == "cpu":
        return runner_on(model, kv, token_rungs)
    from diptych.engine.runner.gpu.new_runner import new_runner

    return new_runner(model, limits_of(model), device, with_graphs=bool(token_rungs))


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


@pytest.fixture
def model(source: ModelSource) -> LoadedModel:
    return load_model(source, empty_pool(source), ModelOptions("float32", max_requests=8))


def test_logits_are_of_the_rows_that_are_asked_for(
    new_driver: NewDriver, source: ModelSource, model: LoadedModel
) -> None:
    """Logits are asked for of prompt tokens, of some requests only, of none."""
    (step,) = batches(new_driver(source), [(EXTEND, {0: 5, 1: 4})])
    of_prompt = replace(step, prompt_rows=PromptRows(np.array([1, 2, 6]), np.array([3, 4, 5]), 1))
    second = replace(step, num_sampled=np.array([0, 1]))
    nobody = replace(step, num_sampled=np.array([0, 0]))
    expected, found = (
        logits_of(runner_on(model.on(kv), kv, rungs), [of_prompt, second, nobody, step])
        for kv, rungs in ((empty_pool(source), ()), (empty_pool(source), RUNGS))
    )
    assert [len(each) for each in found] == [5, 1, 0, 2]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_one_model_on_two_pools_writes_to_that_of_the_step(
    new_driver: NewDriver, source: ModelSource, model: LoadedModel
) -> None:
    pools = [empty_pool(source) for _ in range(2)]
    runners = [runner_on(model.on(kv), kv, RUNGS) for kv in pools]
    steps = list(batches(new_driver(source)))
    for step in steps:
        assert_same_bits(*(runner.logits(step) for runner in runners))
        assert_same_bits(*pools)


def test_tokens_that_the_host_does_not_know_yet_are_filled_in(
    new_driver: NewDriver, source: ModelSource, model: LoadedModel
) -> None:
    """Also in the step in which the pieces are recorded."""
    driver, kv = new_driver(source), empty_pool(source)
    runner = runner_on(model.on(kv), kv, RUNGS)
    first, second = batches(driver, [(EXTEND, {0: 5, 1: 9}), (MIXED, {1: 1, 0: 1, 2: 4})])
    chosen = runner.execute(first, driver.greedy(2)).token_ids
    unknown = replace(second, input_ids=np.concatenate([[-2, -1], second.input_ids[2:]]))
    known = replace(second, input_ids=np.concatenate([[chosen[1], chosen[0]], second.input_ids[2:]]))
    assert 8 not in runner.recorded.pieces
    found = [runner.logits(step).clone() for step in (unknown, known, unknown)]
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_layers_are_told_of_in_order_when_their_attention_is_queued_and_of_no_recording(
    new_driver: NewDriver, source: ModelSource, model: LoadedModel
) -> None:
    kv, heard = empty_pool(source), list[tuple[int, list[bool]]]()
    (step,) = batches(new_driver(source), [(EXTEND, {0: 5})])
    slots = step.out_slots

    def listen(layer: int) -> None:
        """Note which layers have numbers in the pool."""
        heard.append((layer, [not kv[slots // 16, each, :, slots % 16].isnan().any() for each in (0, 1)]))

    runner = runner_on(model.on(kv), kv, RUNGS, layer_listener=lambda: listen)
    for _ in range(2):
        runner.logits(step)
        kv.fill_(torch.nan)
    assert [layer for layer, _ in heard] == [0, 1, 0, 1]
    assert heard[2:] == [(0, [True, False]), (1, [True, True])]


@pytest.mark.parametrize("token_rungs", [(), RUNGS], ids=["launched", "replayed"])
def test_ranks_add_up_the_same_scattered_or_not(
    new_driver: NewDriver, source: ModelSource, on_ranks: Callable[..., Any], token_rungs: Sequence[int]
) -> None:
    driver = new_driver(source)
    steps, kv = list(batches(driver)), empty_pool(source)
    expected = logits_of(runner_on(load_model(source, kv, ModelOptions("float32", max_requests=8)), kv, ()), steps)

    def work(communicator: Communicator) -> list[Tensor]:
        part = empty_pool(source, communicator)
        model = load_model(source, part, ModelOptions("float32", max_requests=8), communicator)
        return logits_of(runner_on(model, part, token_rungs), steps)

    whole, scattered = on_ranks(2, work), on_ranks(2, work, SumRule(2, 0))
    for ours, theirs, again in zip(whole, expected, scattered, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert torch.equal(ours, again)


def test_a_replay_runs_what_was_recorded_in_its_order_for_each_size_and_returns_its_output() -> None:
    inputs = torch.tensor([1.0, 2.0])

    def both(rung: int, pieces: Pieces) -> None:
        pieces.run(lambda: inputs * rung)
        pieces.run(lambda: inputs + rung)

    graphs = PieceGraphs(
        (1, 2), Recorder(), lambda num_tokens: Buffers(*torch.zeros(len(fields(Buffers)), num_tokens, 1))
    )
    for rung in (1, 2):
        graphs.record(rung, partial(both, rung))
    for value in (5.0, 6.0):
        inputs.fill_(value)
        for rung in (2, 1):
            run = graphs.replayed(rung).run
            outputs = [run(lambda: torch.zeros(2)) for _ in range(2)]
            assert [each.tolist() for each in outputs] == [[value * rung] * 2, [value + rung] * 2]


def test_sizes_share_memory_whose_padding_holds_numbers_and_what_they_take_is_told(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked, seen = list[int](), list[Buffers]()

    def new_buffers(num_tokens: int) -> Buffers:
        asked.append(num_tokens)
        buffers = model.new_buffers(num_tokens, CPU)
        buffers.attended.fill_(torch.nan)
        return buffers

    def forward(pieces: Pieces) -> None:
        seen.append(pieces.buffers)
        for _ in range(3):
            pieces.run(lambda: None)

    graphs = PieceGraphs(RUNGS, Recorder(2 * MIB), new_buffers)
    assert (asked, len(graphs), graphs.nbytes) == ([], 0, 0)
    for rung in (16, 24):
        graphs.record(rung, forward)
        forward(graphs.replayed(rung))
    assert asked == [24]
    assert [len(buffers.qkv) for buffers in seen] == [16, 16, 24, 24]
    assert len({buffers.qkv.data_ptr() for buffers in seen}) == 1
    assert not seen[-1].attended.any()
    assert (len(graphs), graphs.nbytes) == (2, 12 * MIB)
    assert "3 pieces of a step of 24 tokens" in caplog.text
    assert "those of all 2 sizes 12 MiB" in caplog.text
