"""Runs the largest step, and sees what it takes and what is left."""

from __future__ import annotations

import torch

from diptych.engine.batch import Runner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.largest_step import largest_step
from diptych.engine.runner.gpu.memory import DeviceMemory


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
