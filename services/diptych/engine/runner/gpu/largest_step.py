"""The step that takes the most memory: as many new tokens, and as many requests to sample for, as a step can have.

All prompt tokens want log-probabilities, too: their logits may take more than the rest. It is run to see what it takes,
on a few pages that all of its requests share: what they compute means nothing.
"""

from __future__ import annotations

import numpy as np

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, SamplingBatch


def longest_extend(limits: StepLimits, page_size: int) -> int:
    """Return how many tokens a request of the step has."""
    num_requests = min(limits.max_requests, limits.max_step_tokens)
    return min(-(-limits.max_step_tokens // num_requests), limits.max_pages * page_size)


def largest_step(limits: StepLimits, page_size: int) -> tuple[ForwardBatch, SamplingBatch]:
    """Return the step, whose requests have all pages from 0 on, and a way to sample that is not the cheapest."""
    length = longest_extend(limits, page_size)
    num_requests = min(limits.max_requests, -(-limits.max_step_tokens // length))
    positions = np.tile(np.arange(length), num_requests)[: limits.max_step_tokens]
    lens = np.full(num_requests, length)
    lens[-1] -= num_requests * length - len(positions)
    pages = np.arange(-(-length // page_size), dtype=np.int32)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=np.zeros_like(positions),
        positions=positions,
        out_slots=positions,
        page_table=np.tile(pages, (num_requests, 1)),
        seq_lens=lens,
        extend_lens=lens,
        num_sampled=np.ones_like(lens),
        prompt_rows=PromptRows(np.arange(len(positions)), np.zeros_like(positions), 1),
    )
    return batch, _drawn(num_requests)


def _drawn(num_samples: int) -> SamplingBatch:
    ones = np.ones(num_samples, np.float32)
    zeros = np.zeros(num_samples, np.int64)
    return SamplingBatch(ones, ones * np.float32(0.9), zeros, zeros.astype(np.uint64), zeros)
