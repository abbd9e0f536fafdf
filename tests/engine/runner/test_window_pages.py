"""Layers with a window on pages of their own: logits are those of a model that keeps all tokens.

The driver overwrites the pages that no window sees any more, and has the newest page stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import Recorder, emulated_runner
from torch import Tensor

from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.ladder import ladder
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.values.batch import ForwardBatch, ForwardMode

FAMILIES = (
    "gpt oss",
    "gemma3, groups of windows of which the last is not full",
    "llama 4",
    "gemma4, groups of layers with heads of two widths",
    "mistral",
)
FEW_FAMILIES = ("gpt oss", "llama 4", "gemma4, groups of layers with heads of two widths")  # for Triton's interpreter
of_families = pytest.mark.parametrize("family_model", FAMILIES, indirect=True)
CHUNKS, NUM_DECODED = (7, 1, 30, 16, 21), 35
FEW_CHUNKS = (20,)  # likewise
NUM_TOKENS = 120
NewDriver = Callable[..., Any]


def steps(driver: Any, lens: Sequence[int] = CHUNKS, num_decoded: int = NUM_DECODED) -> Iterator[ForwardBatch]:
    """Yield prompts in odd chunks, some beside a request that continues; then single tokens of all.

    Each is made when the one before it has been computed: pages are overwritten then.
    """
    random = np.random.default_rng(3)
    texts, at = [random.integers(1, 200, NUM_TOKENS).tolist() for _ in range(3)], [0] * 3

    def step(mode: ForwardMode, *new: int) -> ForwardBatch:
        chunks = {i: texts[i][at[i] : at[i] + length] for i, length in enumerate(new) if length}
        at[:] = [start + length for start, length in zip(at, new, strict=True)]
        batch: ForwardBatch = driver.batch(mode, chunks)
        return batch

    for first, second in zip(lens, reversed(lens), strict=True):
        yield step(ForwardMode.EXTEND, first, second, 0)
        yield step(ForwardMode.MIXED, 1, 0, first)
    for _ in range(num_decoded):
        yield step(ForwardMode.DECODE, 1, 1, 1)


def logits(driver: Any, *options: Any) -> list[Tensor]:
    return [driver.runner.logits(step).clone().cpu() for step in steps(driver, *options)]


@of_families
@pytest.mark.parametrize(("backend", "tolerance"), [("cpu", 0.0), ("torch", 1e-4)])
def test_logits_are_those_of_a_model_that_keeps_all_tokens(
    new_driver: NewDriver, family_model: Any, backend: str, tolerance: float
) -> None:
    source = open_model(str(family_model.folder))
    assert len(source.config.page_groups) > 1
    own, kept = (logits(new_driver(each, backend)) for each in (source, keeping_all(source)))
    torch.testing.assert_close(own, kept, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("family_model", FEW_FAMILIES, indirect=True)
def test_kernels_of_gpus_give_the_logits_of_a_model_that_keeps_all_tokens(
    new_driver: NewDriver, family_model: Any, device: torch.device
) -> None:
    source, options = open_model(str(family_model.folder)), () if device.type == "cuda" else (FEW_CHUNKS, 1)
    own = logits(new_driver(source, "triton", device=device.type), *options)
    torch.testing.assert_close(own, logits(new_driver(keeping_all(source)), *options), atol=1e-3, rtol=1e-4)


@of_families
def test_graphs_of_gpus_give_the_logits_of_a_model_that_keeps_all_tokens(
    new_driver: NewDriver, family_model: Any, device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("graphs need a GPU")
    from diptych.engine.runner.gpu.new_runner import new_runner

    source = open_model(str(family_model.folder))
    driver, options = new_driver(source, "triton", device=device.type), ModelOptions("float32", max_requests=8)
    driver.runner = new_runner(load_model(source, driver.kv, options), limits_of(source), device, with_graphs=True)
    torch.testing.assert_close(logits(driver), logits(new_driver(keeping_all(source))), atol=1e-3, rtol=1e-4)
    assert len(driver.runner.recorded.graphs) == 1


def limits_of(source: ModelSource) -> StepLimits:
    return StepLimits(64, 8, 16, num_window_groups=len(source.config.page_groups) - 1)


@of_families
def test_narrow_keys_and_values_are_those_of_a_model_that_keeps_all_tokens(
    new_driver: NewDriver, family_model: Any
) -> None:
    source = open_model(str(family_model.folder))
    own, kept = (logits(new_driver(each, kv_dtype="fp8_e4m3")) for each in (source, keeping_all(source)))
    torch.testing.assert_close(own, kept, atol=0.0, rtol=0.0)


@of_families
def test_replays_give_the_logits_of_steps_that_are_launched(new_driver: NewDriver, family_model: Any) -> None:
    """A replay finds each group's pages where they were when it was recorded."""
    source = open_model(str(family_model.folder))
    launched, replayed = (new_driver(source, "torch") for _ in range(2))
    model, recorder = load_model(source, replayed.kv, ModelOptions("float32", attention_backend="torch")), Recorder()
    replayed.runner = emulated_runner(
        model, replayed.kv, limits_of(source), rungs=ladder(8), token_rungs=(16, 64), recorder=recorder
    )
    torch.testing.assert_close(logits(replayed), logits(launched), atol=5e-4, rtol=1e-4)
    assert (len(replayed.runner.recorded.graphs), len(replayed.runner.recorded.pieces)) == (1, 2)


@of_families
def test_rows_of_drafts_are_computed_one_by_one(new_driver: NewDriver, family_model: Any) -> None:
    source = open_model(str(family_model.folder))
    for backend in ("cpu", "torch"):
        rows, single = (new_driver(source, backend) for _ in range(2))
        for driver in (rows, single):
            driver.extend({0: list(range(1, 60)), 1: list(range(100, 140))})
        step = rows.batch(ForwardMode.DECODE, {0: [5, 6, 7], 1: [8]})
        found = rows.runner.logits(replace(step, num_sampled=step.extend_lens))
        expected = [single.decode({0: 5, 1: 8}), single.decode({0: 6}), single.decode({0: 7})]
        torch.testing.assert_close(found, torch.cat(expected)[[0, 2, 3, 1]], atol=1e-4, rtol=0.0)


@of_families
def test_a_step_that_names_no_pages_of_windows_is_refused(new_driver: NewDriver, family_model: Any) -> None:
    source = open_model(str(family_model.folder))
    driver = new_driver(source)
    step = replace(driver.batch(ForwardMode.EXTEND, {0: [1, 2, 3]}), window_groups=None)
    with pytest.raises(AssertionError, match="pages of their own, which this step does not name"):
        driver.runner.logits(step)
