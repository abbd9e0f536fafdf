"""Runs steps before there is a pool: sees what the largest takes and leaves, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.warm_up import greedy, prompts, step_of
from diptych.engine.values.batch import ForwardBatch, ForwardMode, OverlapRunner, PromptRows, Runner, SamplingBatch

TOKENS: Final = 4096  # of a step whose kernels take longer than launching them: of 512 in FP8 they did not
FEW_TOKENS: Final = 16  # of one whose launches are what takes the time
ROUNDS: Final = 3  # after one that compiles and loads kernels; the fastest counts


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU with a loaded model. Bytes."""

    total: int
    free: int  # while no step runs, and none keeps anything
    own: int  # this process's tensors then: the weights
    step_peak: int  # what the largest step takes on top, until it is over


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """How fast steps are that are launched kernel by kernel."""

    prompt_tokens_per_s: float
    launch_s: float


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


def measure_beside(work: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes `work` takes of the device, beside what is there, until what it returned is dropped.

    The first run compiles and loads kernels; the second is measured.
    """
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def longest_extend(limits: StepLimits, page_size: int) -> int:
    """Return how many tokens a request of the largest step has."""
    num_requests = min(limits.max_requests, limits.max_step_tokens)
    return min(-(-limits.max_step_tokens // num_requests), limits.max_pages * page_size)


def largest_step(limits: StepLimits, page_size: int) -> tuple[ForwardBatch, SamplingBatch]:
    """Return the step that takes the most memory, and a way to sample that is not the cheapest.

    It has as many new tokens, and requests to sample for, as a step can have, and all prompt tokens want
    log-probabilities: their logits may take more than the rest. What it computes means nothing.
    """
    length = longest_extend(limits, page_size)
    num_requests = min(limits.max_requests, -(-limits.max_step_tokens // length))
    lens = np.full(num_requests, length)
    lens[-1] -= max(0, num_requests * length - limits.max_step_tokens)
    batch = step_of(ForwardMode.EXTEND, lens, limits, page_size)
    prompt_rows = PromptRows(np.arange(len(batch.input_ids)), batch.input_ids, 1)
    return replace(batch, prompt_rows=prompt_rows), SamplingBatch.alike(num_requests, temperature=1.0, top_p=0.9)


def measure_speed(runner: OverlapRunner, limits: StepLimits, page_size: int, device: torch.device) -> StepSpeed:
    """Return how fast steps of one prompt are, while no pool is allocated."""
    small, large = timed_steps(limits, page_size)
    torch.cuda.synchronize(device)
    return step_speed(runner, small, large, time.perf_counter)


def timed_limits(limits: StepLimits, room: float) -> StepLimits:
    """Return limits by which `timed_steps` are long enough, if a step has `room` for so many tokens."""
    return replace(limits, max_step_tokens=max(limits.max_step_tokens, min(TOKENS, int(room))))


def longest_timed(limits: StepLimits, page_size: int) -> int:
    """Return how many tokens a request of `timed_steps` has at most."""
    return min(TOKENS, limits.max_pages * page_size, limits.max_step_tokens)


def timed_steps(limits: StepLimits, page_size: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Return a step whose launches are what takes the time, and one whose kernels are; each has one prompt."""
    longest = longest_timed(limits, page_size)
    small, large = (prompts(min(tokens, longest), limits, page_size, longest) for tokens in (FEW_TOKENS, TOKENS))
    return small, large


def step_speed(
    runner: OverlapRunner, small: ForwardBatch, large: ForwardBatch, clock: Callable[[], float]
) -> StepSpeed:
    """Run the steps; nothing else may run. On tensor-parallel ranks this is a collective."""
    launches_s, steps_s = [], []
    for _ in range(1 + ROUNDS):
        began_s = clock()
        logits = runner.logits(small)
        launches_s.append(clock() - began_s)
        runner.sample(small, logits, greedy(small.batch_size))()
        began_s = clock()
        runner.execute(large, greedy(large.batch_size))
        steps_s.append(clock() - began_s)
    return StepSpeed(len(large.input_ids) / min(steps_s[1:]), min(launches_s[1:]))
