"""The model of these benchmarks on one GPU as a worker has it: loaded, on a pool, behind the runner of workers."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from forward_batches import PAGE_SIZE, greedy
from int4_model import Int4Model
from llama_8b import CONTEXT_LEN
from step_marks import Marks, Pace
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource
from diptych.engine.runner.gpu.bus import Bus
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner
from diptych.engine.runner.kv_pool import new_kv
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode, OverlapRunner

MAX_REQUESTS: Final = 64
MAX_STEP_TOKENS: Final = 8192
DEVICE: Final = torch.device("cuda", 0)
WEIGHTS: Final = {"bfloat16": "auto", "fp8": "fp8", "int4": "auto"}  # what a worker's `--quantization` is
HOLD_CYCLES: Final = 60_000_000  # 30 ms, in which a step is queued


def load(source: ModelSource, num_pages: int, kv_dtype: str = "bfloat16", weights: str = "bfloat16") -> LoadedModel:
    """Load the model onto a pool of random KV; `weights` as in `WEIGHTS`."""
    options = ModelOptions(dtype="bfloat16", quantization=WEIGHTS[weights])
    source = Int4Model(source) if weights == "int4" else source
    return load_model(source, random_pool(source.config, num_pages, kv_dtype), options)


def random_pool(config: ModelConfig, num_pages: int, kv_dtype: str = "bfloat16") -> Tensor:
    kv = new_kv(ModelRunner.pool_layout(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=kv_dtype), DEVICE)
    for start in range(0, num_pages, 64):
        part = kv[start : start + 64]
        part.copy_(torch.randn(part.shape, device=DEVICE))
    return kv


def runner_of(model: LoadedModel, *, with_graphs: bool, bus: Bus | None = None) -> OverlapRunner:
    limits = StepLimits(MAX_STEP_TOKENS, MAX_REQUESTS, CONTEXT_LEN // PAGE_SIZE)
    return new_runner(model, limits, DEVICE, with_graphs=with_graphs, bus=bus)


def overlapped(runner: OverlapRunner, batch: ForwardBatch, num_steps: int) -> Pace:
    """Run the same step over and over, as an overlapping scheduler does: each is queued while the one before runs.

    Decode steps take the tokens of the step before where they were sampled.
    """
    marks, sampling = Marks(runner, num_steps, len(batch.input_ids)), greedy(batch.num_samples)
    pending = marks.sample(batch, marks.logits(batch), sampling)
    if batch.mode is ForwardMode.DECODE:
        batch = replace(batch, input_ids=-1 - np.arange(batch.batch_size))
    while not marks.is_full:
        wait = marks.sample(batch, marks.logits(batch), sampling)
        pending()
        pending = wait
    pending()
    return marks.pace()


def one_by_one(runner: OverlapRunner, batch: ForwardBatch, num_steps: int) -> float:
    """Return the median seconds of a step whose tokens are waited for before the next is queued."""
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        runner.execute(batch, greedy(batch.num_samples))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def kernels_s(runner: OverlapRunner, batch: ForwardBatch, num_steps: int) -> float:
    """Return the median seconds that the GPU takes for a step that is queued as a whole before it may begin."""
    sampling, times = greedy(batch.num_samples), list[float]()
    for _ in range(num_steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        wait = runner.sample(batch, runner.logits(batch), sampling)
        end.record()
        wait()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
