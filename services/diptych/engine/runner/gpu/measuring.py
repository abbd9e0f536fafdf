"""Runs steps before there is a pool: sees what the largest takes and leaves, and how fast they are."""

from __future__ import annotations

import time

import torch

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.largest_step import largest_step
from diptych.engine.runner.gpu.memory import DeviceMemory
from diptych.engine.runner.gpu.step_speed import FEW_TOKENS, TOKENS, StepSpeed, step_speed
from diptych.engine.runner.gpu.warm_up import prompts
from diptych.engine.values.batch import OverlapRunner, Runner


def measure(runner: Runner, limits: StepLimits, page_size: int, device: torch.device) -> DeviceMemory:
    """Return what the device has while a model is loaded and no pool is allocated.

    The first run compiles kernels and has libraries allocate what they keep; the second is measured.
    """
    batch, sampling = largest_step(limits, page_size)
    runner.execute(batch, sampling)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    own = torch.cuda.memory_allocated(device)
    runner.execute(batch, sampling)
    peak = torch.cuda.max_memory_allocated(device) - own
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, own, peak)


def measure_speed(runner: OverlapRunner, limits: StepLimits, page_size: int, device: torch.device) -> StepSpeed:
    """Return how fast steps of one prompt are, while no pool is allocated."""
    longest = min(limits.max_pages * page_size, limits.max_step_tokens)
    small, large = (prompts(min(tokens, longest), limits, page_size, longest) for tokens in (FEW_TOKENS, TOKENS))
    torch.cuda.synchronize(device)
    return step_speed(runner, small, large, time.perf_counter)
