"""Chooses the tokens of a step by Triton kernels: all is queued, and nothing waits.

Imports Triton: a process without a GPU has no need of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.common.arrays import F32
from diptych.engine.runner.gpu.bus import Bus, CopyEngines
from diptych.engine.runner.gpu.staging import pack, place
from diptych.engine.runner.gpu.step_ends import StepEnds
from diptych.engine.runner.sampling.sampler import flat_label_logprobs
from diptych.engine.runner.sampling.uniforms import uniforms
from diptych.engine.values.batch import (
    NO_TOKEN,
    Bias,
    ForwardBatch,
    Penalties,
    PromptRows,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.engine.values.logit_processor import Processed
from diptych.generation.logprobs import LogprobsBatch
from diptych.kernels.gpu.sampling.logits_adjust import apply_bias, apply_penalties, apply_token_mask
from diptych.kernels.gpu.sampling.logprobs import logprobs
from diptych.kernels.gpu.sampling.sampling import greedy, sample, sampling_workspace

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLogprobs:
    """As `LogprobsBatch`."""

    logprobs: Tensor  # float32 [num_rows]
    top_ids: Tensor  # int64 [num_rows, max_top]
    top_logprobs: Tensor  # float32 [num_rows, max_top]

    @staticmethod
    def empty(num_rows: int, num_top: int, device: torch.device) -> DeviceLogprobs:
        return DeviceLogprobs(
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, num_top, dtype=torch.int64, device=device),
            torch.empty(num_rows, num_top, device=device),
        )

    def to_host(self, bus: Bus) -> LogprobsBatch:
        """Queue the copy; what it gives may be read when that is over."""
        copies = (_to_host(part, bus).numpy() for part in (self.logprobs, self.top_ids, self.top_logprobs))
        return LogprobsBatch(*copies)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceResult:
    """As `StepResult`, on the device still: the next step may use it there before the host knows it."""

    token_ids: Tensor  # int64 [num_samples]
    logprobs: DeviceLogprobs | None
    prompt_logprobs: DeviceLogprobs | None
    bus: Bus
    inputs: Sequence[Tensor]  # pinned memory that is read before the result is there, kept until then
    vectors: Tensor | None = None  # float32, sample after sample
    vector_lens: Sequence[int] = ()  # [num_samples]

    def start_copy(self, ends: StepEnds) -> WaitForResult:
        """Queue the copy to the host on the current stream; return what waits for it, with `ends`."""
        result = StepResult(
            _to_host(self.token_ids, self.bus).numpy(),
            None if self.logprobs is None else self.logprobs.to_host(self.bus),
            None if self.prompt_logprobs is None else self.prompt_logprobs.to_host(self.bus),
            None if self.vectors is None else self._cut(_to_host(self.vectors, self.bus)),
        )
        if self.token_ids.device.type == "cpu":
            return lambda: result
        is_over = torch.cuda.Event(enable_timing=True)
        is_over.record()
        return partial(_wait, ends, is_over, result, self.inputs)

    def _cut(self, vectors: Tensor) -> list[F32]:
        return list(map(Tensor.numpy, torch.split(vectors, list(self.vector_lens))))


def pooled_result(vectors: Tensor, bus: Bus) -> DeviceResult:
    """Return the vectors `[num_samples, size]` that a model has made in place of text."""
    is_good = vectors.isfinite().all(dim=-1)
    token_ids = torch.zeros_like(is_good, dtype=torch.int64).masked_fill_(~is_good, NO_TOKEN)
    return DeviceResult(token_ids, None, None, bus, (), vectors.flatten(), [vectors.shape[1]] * len(vectors))


def _wait(ends: StepEnds, is_over: torch.cuda.Event, result: StepResult, inputs: Sequence[Tensor]) -> StepResult:
    """Whoever holds this call keeps the `inputs`."""
    late_s = ends.wait(is_over)
    return replace(result, late_s=late_s) if late_s else result


def _to_host(tensor: Tensor, bus: Bus) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    bus.copy(pinned, tensor)
    return pinned


@dataclass(frozen=True, slots=True, eq=False)
class StagedSampling:
    """A `SamplingBatch` on the device. What no row asks for is None."""

    rows: Tensor  # float64 [5, num_samples]: see `pack_rows`
    is_greedy: bool  # nobody draws, and `rows` is not read
    bias: Sequence[Tensor]  # those of `Bias`, in their order; () where nobody asks for any, as below
    penalties: Sequence[Tensor]  # those of `Penalties`
    processed: Sequence[Processed]
    token_mask: Tensor | None
    num_top: Tensor | None  # int64 [num_samples]; -1: nothing
    pinned: Tensor  # what is read on the way to the device
    max_top: int = 0  # the most likely tokens that a row wants

    @property
    def changes_logits(self) -> bool:
        return bool(self.bias or self.penalties or self.processed or self.token_mask is not None)


def stage(sampling: SamplingBatch, device: torch.device, bus: Bus) -> StagedSampling:
    """Queue one copy of all that is asked for on the device's current stream; wait for nothing."""
    bias, penalties, num_top = sampling.bias, sampling.penalties, sampling.num_top
    groups: list[Sequence[npt.NDArray[Any]]] = [
        (pack_rows(sampling),),
        () if bias is None else (bias.rows, bias.token_ids, bias.values),
        () if penalties is None else (penalties.rows, penalties.token_ids, penalties.repetition, penalties.subtract),
        () if sampling.token_mask is None else (sampling.token_mask,),
        () if num_top is None else (num_top,),
    ]
    arrays, pinned = upload([array for group in groups for array in group], device, bus)
    staged = iter(arrays)
    rows, biases, penalised, mask, tops = ([next(staged) for _ in group] for group in groups)
    return StagedSampling(
        rows=rows[0],
        is_greedy=not (sampling.temperature > 0).any(),
        bias=biases,
        penalties=penalised,
        processed=sampling.processed,
        token_mask=mask[0] if mask else None,
        num_top=tops[0] if tops else None,
        pinned=pinned,
        max_top=0 if num_top is None else int(num_top.max(initial=0)),
    )


def pack_rows(sampling: SamplingBatch) -> F64:
    """Return the parameters of each row: temperature, top-k, top-p, min-p, uniform number.

    float64 holds them all. Uniform numbers are hashed on the host, where they are exact and cost a microsecond.
    """
    min_p = np.zeros_like(sampling.top_p) if sampling.min_p is None else sampling.min_p
    drawn = uniforms(sampling.seeds, sampling.positions)
    rows: F64 = np.stack([sampling.temperature, sampling.top_k, sampling.top_p, min_p, drawn], dtype=np.float64)
    return rows


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device, bus: Bus) -> tuple[list[Tensor], Tensor]:
    """Return the arrays on the device, and the pinned memory that they are read from, to be kept until they are."""
    offsets, nbytes = place([array.nbytes for array in arrays])
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(pinned.numpy(), arrays, offsets)
    copied = torch.empty(nbytes, dtype=torch.uint8, device=device)
    bus.copy(copied, pinned)
    staged = [
        copied[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
    return staged, pinned


class GpuSampler:
    """bfloat16, float16 or float32 logits. Used on one stream at a time."""

    def __init__(self, device: torch.device, vocab_size: int, max_rows: int, bus: Bus | None = None) -> None:
        """More than `max_rows` rows, as prompts may have, are done in pieces of so many."""
        self._device = device
        self._bus = bus or CopyEngines()
        self._vocab_size = vocab_size
        self._workspace = sampling_workspace(max_rows, vocab_size, device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for the model's logits: at its first request, each would stop the engine for seconds."""
        plain = [SamplingBatch.alike(1, temperature) for temperature in (0.0, 1.0)]
        for sampling in (*plain, *(_with_everything(one, self._vocab_size) for one in plain)):
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            self.launch(logits, stage(sampling, self._device, self._bus), None)

    def queue(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> DeviceResult:
        """Queue the choice of a batch's tokens. `logits`, of its samples and its prompt rows, may be overwritten."""
        labels, num_samples = sampling.labels, len(sampling.temperature)
        found = None if labels is None else flat_label_logprobs(logits[:num_samples], labels)  # before logits change
        result = self.launch(logits, stage(sampling, self._device, self._bus), batch.prompt_rows)
        if labels is None:
            return result
        return replace(result, vectors=found, vector_lens=np.bincount(labels.rows, minlength=num_samples).tolist())

    def launch(self, logits: Tensor, staged: StagedSampling, prompt_rows: PromptRows | None) -> DeviceResult:
        """As `queue`, of what is on the device."""
        num_samples = staged.rows.shape[1]
        own = logits[:num_samples]
        token_ids, inputs = self._choose(_adjusted(own, staged), staged), [staged.pinned]
        return DeviceResult(
            token_ids,
            self._logprobs_of_samples(own, token_ids, staged),
            None if prompt_rows is None else self._logprobs_of_prompts(logits[num_samples:], prompt_rows, inputs),
            self._bus,
            inputs,
        )

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
        if staged.num_top is None:
            return None
        wanted = token_ids.masked_fill(staged.num_top < 0, -1)
        return self._logprobs(logits, wanted, staged.max_top)

    def _logprobs_of_prompts(self, logits: Tensor, rows: PromptRows, inputs: list[Tensor]) -> DeviceLogprobs:
        (targets,), pinned = upload([rows.target_ids], self._device, self._bus)
        inputs.append(pinned)
        return self._logprobs(logits, targets, rows.num_top)

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
    changed = logits.to(torch.float32, copy=staged.num_top is not None)
    if staged.bias:
        apply_bias(changed, *staged.bias)
    if staged.penalties:
        apply_penalties(changed, *staged.penalties)
    for row, change in staged.processed:
        change(changed[row])
    if staged.token_mask is not None:
        apply_token_mask(changed, staged.token_mask)
    return changed


def _with_everything(sampling: SamplingBatch, vocab_size: int) -> SamplingBatch:
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.int64)
    return replace(
        sampling,
        bias=Bias(zeros, zeros, ones),
        penalties=Penalties(zeros, zeros, ones, ones),
        token_mask=np.full((1, -(-vocab_size // 32)), -1, np.int32),
        num_top=zeros + 1,
    )
