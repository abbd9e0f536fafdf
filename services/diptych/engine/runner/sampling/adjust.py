"""Changes logits as requests ask, before a token is chosen: bias, then penalties, then what the mask allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from diptych.common.arrays import I32
from diptych.engine.values.batch import Bias, Penalties, SamplingBatch

Forbid = Callable[[Tensor, I32], None]


def adjust(logits: Tensor, sampling: SamplingBatch, forbid: Forbid) -> Tensor:
    """Return the logits to choose from, `[num_samples, vocab_size]`.

    They are the given ones if nobody asks for a change; else float32, and changed in place unless log-probabilities,
    which are of the logits before, are wanted too.
    """
    if sampling.bias is None and sampling.penalties is None and sampling.token_mask is None:
        return logits
    changed = logits.to(torch.float32, copy=sampling.num_top is not None)
    if sampling.bias is not None:
        _add_bias(changed, sampling.bias)
    if sampling.penalties is not None:
        _penalise(changed, sampling.penalties)
    if sampling.token_mask is not None:
        forbid(changed, sampling.token_mask)
    return changed


def _add_bias(logits: Tensor, bias: Bias) -> None:
    rows, token_ids, values = (_beside(logits, array) for array in (bias.rows, bias.token_ids, bias.values))
    logits.index_put_((rows, token_ids), values, accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    flat, at = logits.view(-1), _beside(logits, penalties.rows * logits.shape[1] + penalties.token_ids)
    repetition, seen = _beside(logits, penalties.repetition), flat.take(at)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat.scatter_(0, at, seen - _beside(logits, penalties.subtract))


def _beside(logits: Tensor, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(logits.device)
