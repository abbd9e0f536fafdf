"""How to choose a step's tokens, on the device: one pinned buffer and one asynchronous copy, however much is asked for.

Uniform numbers are hashed on the host, where they are exact and cost a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.engine.runner.gpu.staging import pack, place
from diptych.engine.runner.sampling.uniforms import uniforms
from diptych.engine.values.batch import SamplingBatch

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StagedBias:
    """As `Bias`."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StagedPenalties:
    """As `Penalties`."""

    rows: Tensor
    token_ids: Tensor
    repetition: Tensor
    subtract: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StagedTop:
    """Who wants log-probabilities, and of how many likely tokens."""

    num_top: Tensor  # int64 [num_samples]; -1: nothing
    width: int  # the most that a row wants


@dataclass(frozen=True, slots=True, eq=False)
class StagedSampling:
    """A `SamplingBatch` on the device. What no row asks for is None."""

    rows: Tensor  # float64 [5, num_samples]: see `pack_rows`
    is_greedy: bool  # nobody draws, and `rows` is not read
    bias: StagedBias | None
    penalties: StagedPenalties | None
    token_mask: Tensor | None
    top: StagedTop | None

    @property
    def changes_logits(self) -> bool:
        return self.bias is not None or self.penalties is not None or self.token_mask is not None


def stage(sampling: SamplingBatch, device: torch.device) -> StagedSampling:
    """Queue the copy on the device's current stream; wait for nothing."""
    bias, penalties, num_top = sampling.bias, sampling.penalties, sampling.num_top
    groups: list[Sequence[npt.NDArray[Any]]] = [
        (pack_rows(sampling),),
        () if bias is None else (bias.rows, bias.token_ids, bias.values),
        () if penalties is None else (penalties.rows, penalties.token_ids, penalties.repetition, penalties.subtract),
        () if sampling.token_mask is None else (sampling.token_mask,),
        () if num_top is None else (num_top,),
    ]
    staged = iter(upload([array for group in groups for array in group], device))
    rows, biases, penalised, mask, tops = ([next(staged) for _ in group] for group in groups)
    return StagedSampling(
        rows=rows[0],
        is_greedy=not (sampling.temperature > 0).any(),
        bias=StagedBias(*biases) if biases else None,
        penalties=StagedPenalties(*penalised) if penalised else None,
        token_mask=mask[0] if mask else None,
        top=None if num_top is None else StagedTop(tops[0], int(num_top.max(initial=0))),
    )


def pack_rows(sampling: SamplingBatch) -> F64:
    """Return the parameters of each row: temperature, top-k, top-p, min-p, uniform number. float64 holds them all."""
    min_p = np.zeros_like(sampling.top_p) if sampling.min_p is None else sampling.min_p
    drawn = uniforms(sampling.seeds, sampling.positions)
    rows: F64 = np.stack([sampling.temperature, sampling.top_k, sampling.top_p, min_p, drawn], dtype=np.float64)
    return rows


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device. The pinned buffer is torch's, which uses it again once it has been read."""
    offsets, nbytes = place([array.nbytes for array in arrays])
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(pinned.numpy(), arrays, offsets)
    copied = pinned.to(device, non_blocking=True)
    return [
        copied[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
