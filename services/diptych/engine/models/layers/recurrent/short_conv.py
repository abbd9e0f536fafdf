"""Short causal convolutions: each channel of a token is mixed with the same channel of the few tokens before it.

A state is a channel's newest inputs, the oldest first. Sums are in float32 and in the order of the text, so they have
the same bits however many tokens are computed at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.turns import turns


def convolve(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[num_tokens, num_channels]` of one request, float32, and bring its `state` up to date.

    `x` is `[num_tokens, num_channels]`, `state` `[num_channels, width - 1]` of the same dtype; `weight` is float32
    `[num_channels, width]`, `bias` float32 `[num_channels]`.
    """
    seen = torch.cat([state.T, x])
    state.copy_(seen[len(x) :].T)
    taps = [seen[i : i + len(x)] for i in range(weight.shape[1])]
    return _sum(taps, weight, bias)


def convolve_prompts(
    x: Tensor, state: Tensor, batch: StagedBatch, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Do the same to each request of a step that has several tokens; `state` `[num_slots, num_channels, width - 1]`."""
    for tokens, own in turns(state, batch):
        out[tokens] = convolve(x[tokens], own, weight, bias)


def convolve_step(x: Tensor, state: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Do the same to one token of each of several requests; `out` is float32 `[num_requests, num_channels]`.

    `x` is `[num_requests, num_channels]`, `state` `[num_slots, num_channels, width - 1]`, `slots` int64
    `[num_requests]`.
    """
    seen = torch.cat([state[slots], x[..., None]], dim=-1)
    state[slots] = seen[..., 1:]
    out.copy_(_sum(list(seen.unbind(-1)), weight, bias))


def _sum(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    total = taps[0].float() * weight[:, 0]
    for i, tap in enumerate(taps[1:], start=1):
        total.add_(tap.float() * weight[:, i])
    return total if bias is None else total.add_(bias)
