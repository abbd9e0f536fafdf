"""Rows of several tokens: each token is computed as if its request had come to it one step later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import emulated_runner
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.attention.staged_batch import logits_rows, single_rows
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.kernels.gpu.attention.decode_attention import rows_together

NUM_PAGES = 64
LIMITS = StepLimits(max_step_tokens=64, max_requests=3, max_pages=NUM_PAGES, max_drafts=5)
PROMPTS = {0: [3, 1, 4, 1, 5], 1: list(range(15)), 2: [9, 2, 6]}  # the second one's row crosses a page
ROWS = {0: [7], 1: [8, 9, 10], 2: [11, 12]}
LATER = {3: [5, 6, 7, 8]}
NewDriver = Callable[..., Any]


@pytest.fixture
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


def with_rows(batch: ForwardBatch, num_rows: int = len(ROWS)) -> ForwardBatch:
    num_sampled = np.where(np.arange(batch.batch_size) < num_rows, batch.extend_lens, 1)
    return replace(batch, num_sampled=num_sampled)


def new_runner(source: ModelSource, rungs: Sequence[int]) -> GpuRunner:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=16, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    return emulated_runner(load_model(source, kv, ModelOptions("float32")), kv, LIMITS, rungs=rungs)


def one_by_one(driver: Any, rows: Mapping[int, list[int]]) -> Tensor:
    """Return the logits behind each token of the rows, by row."""
    found: dict[int, list[Tensor]] = {request: [] for request in rows}
    for i in range(max(map(len, rows.values()))):
        due = {request: tokens[i] for request, tokens in rows.items() if i < len(tokens)}
        for request, logits in zip(due, driver.decode(due), strict=True):
            found[request].append(logits)
    return torch.stack([logits for row in found.values() for logits in row])


@pytest.mark.parametrize("rungs", [(), (4, 8)], ids=["launched", "replayed"])
def test_rows_give_the_logits_of_single_tokens(
    new_driver: NewDriver, source: ModelSource, rungs: tuple[int, ...]
) -> None:
    driver, other = new_driver(source), new_driver(source)
    runner = new_runner(source, rungs)
    runner.logits(driver.batch(ForwardMode.EXTEND, PROMPTS))
    found = runner.logits(with_rows(driver.batch(ForwardMode.DECODE, ROWS)))
    other.extend(PROMPTS)
    torch.testing.assert_close(found, one_by_one(other, ROWS), atol=1e-4, rtol=1e-4)
    assert list(runner.recorded.graphs._captured) == [rung for rung in rungs if rung == 8], (
        "six tokens are six rows of a graph"
    )


def test_rows_beside_prompts_give_the_logits_of_single_tokens(new_driver: NewDriver, source: ModelSource) -> None:
    driver, other = new_driver(source), new_driver(source)
    runner = new_runner(source, ())
    runner.logits(driver.batch(ForwardMode.EXTEND, PROMPTS))
    found = runner.logits(with_rows(driver.batch(ForwardMode.MIXED, {**ROWS, **LATER})))
    other.extend(PROMPTS)
    expected = torch.cat([one_by_one(other, ROWS), other.extend(LATER)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_attend_together_give_the_logits_of_single_tokens(
    new_driver: NewDriver, source: ModelSource, device: torch.device
) -> None:
    """By the kernels of GPUs, beside prompts and without, more rows than a group has."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=16, dtype="float32")
    kv = torch.full(layout.shape, torch.nan, device=device)
    model = load_model(source, kv, ModelOptions("float32", attention_backend="triton"))
    limits = replace(LIMITS, max_drafts=16)
    if device.type == "cpu":
        runner = emulated_runner(model, kv, limits, rows_together=rows_together(2))
    else:
        from diptych.engine.runner.gpu.new_runner import new_runner

        runner = new_runner(model, limits, device, with_graphs=True)
    driver, other = new_driver(source), new_driver(source)
    rows = {0: [7], 1: list(range(20, 31)), 2: [11, 12]}
    runner.logits(driver.batch(ForwardMode.EXTEND, PROMPTS))
    found = runner.logits(with_rows(driver.batch(ForwardMode.DECODE, rows))).clone().cpu()
    other.extend(PROMPTS)
    torch.testing.assert_close(found, one_by_one(other, rows), atol=1e-3, rtol=1e-3)
    later = {0: [1, 2, 3, 4], 1: [5], 2: [6, 7, 8], 3: [9, 10, 11]}
    mixed = runner.logits(with_rows(driver.batch(ForwardMode.MIXED, later))).cpu()
    expected = torch.cat([one_by_one(other, {i: later[i] for i in range(3)}), other.extend({3: later[3]})])
    torch.testing.assert_close(mixed, expected, atol=1e-3, rtol=1e-3)


def test_single_rows_are_the_same_tokens_and_samples(new_driver: NewDriver, source: ModelSource) -> None:
    driver = new_driver(source)
    driver.adapters[1] = 4
    driver.batch(ForwardMode.EXTEND, PROMPTS)
    batch = with_rows(driver.batch(ForwardMode.MIXED, {**ROWS, **LATER}))
    single = single_rows(batch)
    assert single.extend_lens.tolist() == [1, 1, 1, 1, 1, 1, 4]
    assert single.num_sampled.tolist() == [1] * 7
    assert single.seq_lens.tolist() == [6, 16, 17, 18, 4, 5, 4]
    assert single.page_table.tolist() == batch.page_table[[0, 1, 1, 1, 2, 2, 3]].tolist()
    assert single.adapters is not None
    assert single.adapters.tolist() == [-1, 4, 4, 4, -1, -1, -1]
    assert logits_rows(single).tolist() == logits_rows(batch).tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert single_rows(single) is single
