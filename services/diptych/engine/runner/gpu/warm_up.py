"""Steps that a worker runs before it is ready, so that no kernel is compiled or loaded while requests wait.

What a step launches follows from how many tokens and requests it has: a few rows are multiplied in another way than
many, short prompts attend in other tiles than long ones. Powers of two meet all ways. Rule: all tokens are of the null
page, where nobody's KV is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.values.batch import ForwardBatch, ForwardMode, Runner, SamplingBatch, WindowGroups

logger = logging.getLogger(__name__)
PREFIX_TOKENS: Final = 2048
FEW_TOKENS: Final = (2, 32)  # of the smallest tile of attention, and of a larger one
MANY: Final = (16, 24, 48, 96, 192)  # prompts of a step, whose tiles have few rows
EACH: Final = (2, 4, 8, 16, 24)  # tokens of such a prompt: 17 to 63 rows of it, by how many heads have one key


def warm_up(
    launching: Runner,
    replaying: Runner,
    limits: StepLimits,
    page_size: int,
    longest: int,
    recorded_rows: Sequence[int] = (),
    recorded_tokens: Sequence[int] = (),
) -> None:
    """Run the steps kernel by kernel, and decode steps as they will be; `longest`: tokens of one request.

    `replaying` captures the graphs of `recorded_rows` then, and the pieces of steps of `recorded_tokens`, the largest
    first: whether there is memory for it is known before a request needs it, the others find theirs in its, and no
    request waits while one is captured. On tensor-parallel ranks this is a collective.
    """
    began_s, num_steps = time.monotonic(), 0
    for batch in warm_up_steps(limits, page_size, longest):
        launching.execute(batch, greedy(batch.batch_size))
        num_steps += 1
    for num_rows in reversed(recorded_rows or (limits.max_samples,)):
        replaying.execute(_decode(num_rows, limits, page_size), greedy(num_rows))
    for num_tokens in reversed(recorded_tokens):
        batch = prompts(num_tokens, limits, page_size, longest)
        replaying.execute(batch, greedy(batch.batch_size))
    logger.info("%d steps of all sizes were run ahead, in %.1f s", num_steps, time.monotonic() - began_s)


def warm_up_steps(limits: StepLimits, page_size: int, longest: int) -> Iterator[ForwardBatch]:
    """Yield prompts of any number of tokens, then any number of rows of requests that continue, each up to the limit.

    And a few tokens behind a prefix, which is cut into shares, and many prompts of a few tokens each.
    """
    for num_tokens in up_to(limits.max_step_tokens):
        yield (step := prompts(num_tokens, limits, page_size, longest))
        if limits.looks_ahead:
            yield replace(step, looks_ahead=True)
    for num_tokens in FEW_TOKENS:
        prefix_len = min(PREFIX_TOKENS, longest - num_tokens)
        if num_tokens <= prefix_len:
            yield step_of(ForwardMode.EXTEND, np.array([num_tokens]), limits, page_size, prefix_len)
    for num_prompts, num_tokens in product(MANY, EACH):
        fits = num_prompts <= limits.max_requests and num_prompts * num_tokens <= limits.max_step_tokens
        if fits and num_tokens <= longest:
            yield step_of(ForwardMode.EXTEND, np.full(num_prompts, num_tokens), limits, page_size)
    for num_rows in up_to(limits.max_samples):
        yield _decode(num_rows, limits, page_size)


def up_to(limit: int) -> tuple[int, ...]:
    """Return the powers of two below `limit`, half as many again, and `limit`: so all tiles of kernels are met."""
    powers = [1 << exponent for exponent in range((limit - 1).bit_length())]
    between = [3 * power // 2 for power in powers if power > 1 and 3 * power // 2 < limit]
    return (*sorted({*powers, *between}), limit)


def prompts(num_tokens: int, limits: StepLimits, page_size: int, longest: int) -> ForwardBatch:
    """Return a step of so many tokens, in prompts of `longest` and less."""
    full, rest = divmod(num_tokens, longest)
    lens = [longest] * full + [rest] * (rest > 0)
    return step_of(ForwardMode.EXTEND, np.array(lens[: limits.max_requests]), limits, page_size)


def _decode(num_rows: int, limits: StepLimits, page_size: int) -> ForwardBatch:
    """Return a step of so many rows of one token, as those of requests with drafts are computed, too."""
    return step_of(ForwardMode.DECODE, np.ones(num_rows, np.int64), limits, page_size)


def step_of(mode: ForwardMode, lens: I64, limits: StepLimits, page_size: int, prefix_len: int = 0) -> ForwardBatch:
    """Return a step of requests that have so many new tokens each, and `prefix_len` before them."""
    positions = np.concatenate([np.arange(prefix_len, prefix_len + length) for length in lens])
    num_pages = -(-(prefix_len + int(lens.max())) // page_size)
    table, slots = np.zeros((len(lens), num_pages), np.int32), positions % page_size
    num_groups = limits.num_window_groups
    windows = WindowGroups(np.stack([table] * num_groups), np.stack([slots] * num_groups)) if num_groups else None
    return ForwardBatch(
        mode=mode,
        input_ids=np.zeros_like(positions),
        positions=positions,
        out_slots=slots,
        page_table=table,
        seq_lens=prefix_len + lens,
        extend_lens=lens,
        num_sampled=np.ones_like(lens),
        window_groups=windows,
    )


def greedy(num_samples: int) -> SamplingBatch:
    """Return the cheapest way to sample."""
    return SamplingBatch.alike(num_samples, temperature=0.0)


def log_late_kernels() -> None:
    """Have the log say what is compiled from now on, while requests wait: all was run that is known to be needed."""
    import triton  # not everywhere

    triton.knobs.compilation.listener = log_compilation


def log_compilation(*, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **others: object) -> None:
    """Implements Triton's `CompilationListener`."""
    done = "read from Triton's cache" if cache_hit else "compiled"
    logger.warning("kernel %s was %s in %.2f s, while serving", metadata.get("name"), done, times.total / 1e6)
