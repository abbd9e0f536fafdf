"""Changes logits as requests ask, before a token is chosen: bias, then penalties, then what the mask allows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych.engine.batch import I32, Bias, Penalties, SamplingBatch


def adjust(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return the logits to choose from, `[num_samples, vocab_size]`: the given ones if nobody asks for a change."""
    if sampling.bias is None and sampling.penalties is None and sampling.token_mask is None:
        return logits
    changed = logits.to(torch.float32, copy=True)
    if sampling.bias is not None:
        _add_bias(changed, sampling.bias)
    if sampling.penalties is not None:
        _penalise(changed, sampling.penalties)
    if sampling.token_mask is not None:
        _forbid(changed, sampling.token_mask)
    return changed


def _add_bias(logits: Tensor, bias: Bias) -> None:
    at = (torch.from_numpy(bias.rows), torch.from_numpy(bias.token_ids))
    logits.index_put_(at, torch.from_numpy(bias.values), accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    at = (torch.from_numpy(penalties.rows), torch.from_numpy(penalties.token_ids))
    repetition, seen = torch.from_numpy(penalties.repetition), logits[at]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits.index_put_(at, seen - torch.from_numpy(penalties.subtract))


def _forbid(logits: Tensor, token_mask: I32) -> None:
    bits = np.unpackbits(token_mask.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
