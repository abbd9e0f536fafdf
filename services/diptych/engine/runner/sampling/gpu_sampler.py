"""`Sampler` by Triton kernels; `launch` queues a whole step and waits for nothing.

Imports Triton: a process without a GPU has no need of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I32, I64
from diptych.engine.runner.sampling.device_result import DeviceLogprobs, DeviceResult
from diptych.engine.runner.sampling.staged import StagedSampling, stage, upload
from diptych.engine.values.batch import Bias, ForwardBatch, Penalties, PromptRows, SamplingBatch
from diptych.generation.logprobs import LogprobsBatch
from diptych.kernels.gpu.logits_adjust import apply_bias, apply_penalties, apply_token_mask
from diptych.kernels.gpu.logprobs import logprobs
from diptych.kernels.gpu.sampling import greedy, sample, sampling_workspace


class GpuSampler:
    """bfloat16, float16 or float32 logits. Used on one stream at a time."""

    def __init__(self, device: torch.device, vocab_size: int, max_rows: int) -> None:
        """More than `max_rows` rows, as prompts may have, are done in pieces of so many."""
        self._device = device
        self._vocab_size = vocab_size
        self._workspace = sampling_workspace(max_rows, vocab_size, device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for the model's logits: at its first request, each would stop the engine for seconds."""
        plain = [_plain(temperature) for temperature in (0.0, 1.0)]
        for sampling in (*plain, *(_with_everything(one, self._vocab_size) for one in plain)):
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            self.launch(logits, stage(sampling, self._device), None)

    def queue(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> DeviceResult:
        """Queue the choice of a batch's tokens. `logits`, of its samples and its prompt rows, may be overwritten."""
        return self.launch(logits, stage(sampling, self._device), batch.prompt_rows)

    def launch(self, logits: Tensor, staged: StagedSampling, prompt_rows: PromptRows | None) -> DeviceResult:
        """As `queue`, of what is on the device."""
        num_samples = staged.rows.shape[1]
        own = logits[:num_samples]
        token_ids = self._choose(_adjusted(own, staged), staged)
        return DeviceResult(
            token_ids,
            self._logprobs_of_samples(own, token_ids, staged),
            None if prompt_rows is None else self._logprobs_of_prompts(logits[num_samples:], prompt_rows),
        )

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> I64:
        token_ids: I64 = self._choose(logits, stage(sampling, self._device)).cpu().numpy()
        return token_ids

    def logprobs(self, logits: Tensor, token_ids: I64, num_top: int) -> LogprobsBatch:
        found = self._logprobs(logits, upload([token_ids], self._device)[0], num_top)
        return LogprobsBatch(
            found.logprobs.cpu().numpy(), found.top_ids.cpu().numpy(), found.top_logprobs.cpu().numpy()
        )

    def forbid(self, logits: Tensor, token_mask: I32) -> None:
        apply_token_mask(logits, upload([token_mask], self._device)[0])

    def _choose(self, logits: Tensor, staged: StagedSampling) -> Tensor:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for piece in self._pieces(len(logits)):
            if staged.is_greedy:
                greedy(logits[piece], token_ids[piece], self._workspace)
            else:
                heat, top_k, top_p, min_p, uniform = staged.rows[:, piece].unbind(0)
                sample(logits[piece], heat, top_k, top_p, min_p, uniform, token_ids[piece], self._workspace)
        return token_ids

    def _logprobs_of_samples(self, logits: Tensor, token_ids: Tensor, staged: StagedSampling) -> DeviceLogprobs | None:
        """Return zeros for rows that want none, or have no token."""
        if staged.top is None:
            return None
        wanted = token_ids.masked_fill(staged.top.num_top < 0, -1)
        return self._logprobs(logits, wanted, staged.top.width)

    def _logprobs_of_prompts(self, logits: Tensor, rows: PromptRows) -> DeviceLogprobs:
        return self._logprobs(logits, upload([rows.target_ids], self._device)[0], rows.num_top)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> DeviceLogprobs:
        found = DeviceLogprobs.empty(len(logits), num_top, logits.device)
        for piece in self._pieces(len(logits)):
            own, top_ids, top = found.logprobs[piece], found.top_ids[piece], found.top_logprobs[piece]
            logprobs(logits[piece], token_ids[piece], own, top_ids, top, self._workspace)
        return found

    def _pieces(self, num_rows: int) -> Iterator[slice]:
        size = self._workspace.max_rows
        return (slice(first, first + size) for first in range(0, num_rows, size))


def _adjusted(logits: Tensor, staged: StagedSampling) -> Tensor:
    """Return the logits to choose from: the given ones, or changed float32 ones.

    Log-probabilities are of the given ones, which are then kept.
    """
    if not staged.changes_logits:
        return logits
    changed = logits.to(torch.float32, copy=staged.top is not None)
    if staged.bias is not None:
        apply_bias(changed, staged.bias.rows, staged.bias.token_ids, staged.bias.values)
    if staged.penalties is not None:
        seen = staged.penalties
        apply_penalties(changed, seen.rows, seen.token_ids, seen.repetition, seen.subtract)
    if staged.token_mask is not None:
        apply_token_mask(changed, staged.token_mask)
    return changed


def _plain(temperature: float) -> SamplingBatch:
    heat, ones, zeros = np.full(1, temperature, np.float32), np.ones(1, np.float32), np.zeros(1, np.int64)
    return SamplingBatch(heat, ones, zeros, zeros.astype(np.uint64), zeros)


def _with_everything(sampling: SamplingBatch, vocab_size: int) -> SamplingBatch:
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.int64)
    return replace(
        sampling,
        bias=Bias(zeros, zeros, ones),
        penalties=Penalties(zeros, zeros, ones, ones),
        token_mask=np.full((1, -(-vocab_size // 32)), -1, np.int32),
        num_top=zeros + 1,
    )
