"""The runner of GPUs, emulated on a CPU, under a scheduler: the tokens of the runner of CPUs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import Recorder, emulated_runner

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.ladder import ladder
from diptych.engine.runner.gpu.warm_up import warm_up, warm_up_steps
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import QueuedSteps
from diptych.engine.values.batch import ForwardMode
from diptych.generation.sampling_params import SamplingParams

PAGE, NUM_PAGES, VOCAB, MAX_REQUESTS = 4, 128, 321, 8
LIMITS = StepLimits(max_step_tokens=16, max_requests=MAX_REQUESTS, max_pages=NUM_PAGES)
TOKEN_RUNGS = (4, 12, 16)
NewEngine = Callable[..., Any]


def gpu_like(source: ModelSource, with_graphs: bool, recorder: Recorder | None = None) -> GpuRunner:
    """A model without a number in its pool, and limits that a step may reach but not pass."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    model = load_model(source, kv, ModelOptions("float32"))
    rungs, token_rungs = (ladder(MAX_REQUESTS), TOKEN_RUNGS) if with_graphs else ((), ())
    return emulated_runner(model, kv, LIMITS, rungs=rungs, token_rungs=token_rungs, recorder=recorder)


PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.9, seed=5, frequency_penalty=1.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=6, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 4.0}, min_tokens=3, prompt_logprobs=1),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
]


def tokens(engine: Any) -> list[list[int]]:
    for room, wanted in enumerate(PARAMS):
        engine.start_with(room, [room + 1, *range(50, 60 + 9 * room)], wanted)
        engine.step()
    engine.run()
    return [engine.tokens(room) for room in range(len(PARAMS))]


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


@pytest.fixture
def expected(new_engine: NewEngine, source: ModelSource) -> list[list[int]]:
    """What the runner of CPUs gives, step by step."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    runner = ModelRunner(source, torch.full(layout.shape, torch.nan), dtype="float32")
    return tokens(new_engine(NUM_PAGES, max_requests=MAX_REQUESTS, runner=runner, vocab_size=VOCAB))


@pytest.mark.parametrize("with_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "overlapped"])
def test_a_step_gives_the_same_tokens_padded_and_replayed_and_behind_one_whose_tokens_nobody_knows(
    new_engine: NewEngine,
    source: ModelSource,
    expected: list[list[int]],
    with_graphs: bool,
    overlap: bool,
) -> None:
    runner = gpu_like(source, with_graphs)
    if not with_graphs:
        warm_up(runner, runner, LIMITS, PAGE, longest=16)
    engine = new_engine(
        NUM_PAGES,
        max_requests=MAX_REQUESTS,
        overlap=overlap,
        runner=runner,
        vocab_size=VOCAB,
        worker=QueuedSteps,
    )
    assert tokens(engine) == expected
    assert len(runner.recorded.graphs) == (3 if with_graphs else 0)  # of 2, 4 and 8 rows
    assert len(runner.recorded.pieces) == (2 if with_graphs else 0)
    assert runner.graph_use.num_graphs == len(runner.recorded.graphs) + len(runner.recorded.pieces)


def test_all_sizes_are_recorded_ahead_the_largest_first(source: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder = Recorder()
    runner = gpu_like(source, True, recorder)
    warm_up(gpu_like(source, False), runner, LIMITS, PAGE, 8, runner.row_rungs, runner.token_rungs)
    assert len(runner.recorded.pieces) == len(TOKEN_RUNGS)
    rows = [int(size) for size in re.findall(r"decode step of (\d+) rows", caplog.text)]
    assert rows == sorted(runner.row_rungs, reverse=True)
    assert len(rows) == len(runner.recorded.graphs) > 1
    sizes = [int(size) for size in re.findall(r"pieces of a step of (\d+) tokens", caplog.text)]
    assert sizes == sorted(TOKEN_RUNGS, reverse=True)
    ahead = recorder.captured
    for batch in warm_up_steps(LIMITS, PAGE, longest=8):
        if batch.mode is ForwardMode.EXTEND:
            runner.logits(batch)
    assert recorder.captured == ahead
