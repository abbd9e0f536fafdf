"""Which experts a token goes to, and how much of the answer each has.

Groups and the bias of the choice are DeepSeek V3's (arXiv 2412.19437, section 2.1.2): the bias balances the experts'
load, so it decides who is chosen and has no part in the shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.architectures.config import Moe

SMALLEST_SUM = 1e-20  # of shares: sigmoids may all be zero


def route(logits: Tensor, moe: Moe, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return experts and their shares, float32 `[num_tokens, experts_per_token]`, from `[num_tokens, num_experts]`.

    `bias`, float32 `[num_experts]`, is added to the scores by which experts are chosen.
    """
    scores = logits.softmax(-1, dtype=torch.float32) if moe.scoring == "softmax" else logistic(logits.float())
    if bias is None and moe.num_groups == 1:
        shares, chosen = scores.topk(moe.experts_per_token, dim=-1)
    else:
        merits = scores if bias is None else scores + bias
        chosen = _of_best_groups(merits, moe).topk(moe.experts_per_token, dim=-1).indices
        shares = scores.gather(-1, chosen)
    if moe.normalize:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return chosen, shares * moe.scale if moe.scale != 1 else shares


def logistic(x: Tensor) -> Tensor:
    """Return the sigmoid of `x`: the same bits for a number wherever it stands, which torch's own has not on CPUs."""
    return x.neg().exp_().add_(1).reciprocal_()


def _of_best_groups(merits: Tensor, moe: Moe) -> Tensor:
    """Return `merits` with minus infinity for the experts of all other groups."""
    if moe.num_groups == moe.num_groups_kept:
        return merits
    grouped = merits.view(*merits.shape[:-1], moe.num_groups, moe.num_experts // moe.num_groups)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(moe.num_groups_kept, dim=-1).indices
    others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)
