"""State spaces with one decay a head and token (Mamba 2, arXiv 2405.21060), in float32.

A head keeps a matrix `[head_dim, state_size]`. A token lets it decay, adds the product of what the head has of it and
the vector that its group writes with, and reads it with the group's other vector. How much decays and is added says the
token's step. A chunk of tokens is computed at once, section 6 of the paper.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from diptych.engine.models.arithmetic.delta_rule import silu, softplus

CHUNK: Final = 64  # tokens of a prompt that are computed together


class Heads(NamedTuple):
    """A layer's constants of each head, float32 `[num_groups, heads of a group]`."""

    rate: Tensor  # of decays, below 0
    bias: Tensor  # of steps
    skip: Tensor  # so much of what a head has of a token is added to what it reads
    min_step: float
    head_dim: int


class Prepared(NamedTuple):
    """What the scan is given of tokens, in float32."""

    amounts: Tensor  # that are added, [num_tokens, num_groups, heads of a group, head_dim]
    writing: Tensor  # [num_tokens, num_groups, state_size]
    reading: Tensor
    logs: Tensor  # of decays, below 0, [num_tokens, num_groups, heads of a group]
    skipped: Tensor  # as amounts: added to what is read


def in_chunks(mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, out: Tensor) -> None:
    """Compute several tokens of one request: `out`, `[num_tokens, num_heads, head_dim]`, and its `state`, in place.

    `mixed` is float32 `[num_tokens, num_groups, group_channels]`: what is behind the convolution, before SiLU; `steps`
    `[num_tokens, num_heads]` are as they are projected. `state` is float32 `[num_heads, head_dim, state_size]`.
    """
    prepared = prepare(mixed, steps, heads)
    kept, result = state.view(*heads.rate.shape, *state.shape[1:]), out.view(prepared.skipped.shape)
    for start in range(0, len(mixed), CHUNK):
        chunk = Prepared(*(each[start : start + CHUNK] for each in prepared))
        torch.add(_chunk(chunk, kept), chunk.skipped, out=result[start : start + CHUNK])


def step(mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, slots: Tensor, out: Tensor) -> None:
    """Compute one token of each of several requests, a token of `in_chunks`; `state` is `[num_slots, ...]`."""
    prepared, kept = prepare(mixed, steps, heads), state[slots]
    read = _token(prepared, kept.view(len(slots), *heads.rate.shape, *state.shape[2:]))
    state[slots] = kept
    torch.add(read, prepared.skipped, out=out.view(read.shape))


def prepare(mixed: Tensor, steps: Tensor, heads: Heads) -> Prepared:
    """Make it of what `in_chunks` is given: each token by itself, to the bit."""
    size = heads.rate.shape[1] * heads.head_dim
    state_size = (mixed.shape[-1] - size) // 2
    given, writing, reading = torch.split(silu(mixed), [size, state_size, state_size], dim=-1)
    grouped = steps.float().view(len(steps), *heads.bias.shape)
    lengths = softplus(grouped + heads.bias).clamp_(min=heads.min_step)
    given = given.reshape(*grouped.shape, heads.head_dim)
    skipped = given * heads.skip[..., None]
    return Prepared(given * lengths[..., None], writing, reading, lengths * heads.rate, skipped)


def _token(tokens: Prepared, kept: Tensor) -> Tensor:
    """Return what tokens of several requests read; `kept` are these requests' states, by groups."""
    amounts, writing, reading, logs, _ = tokens
    kept.mul_(logs.exp()[..., None, None])
    kept.add_(amounts[..., None] * writing[:, :, None, None])
    return (kept * reading[:, :, None, None]).sum(-1)


def _chunk(tokens: Prepared, kept: Tensor) -> Tensor:
    """Return what the tokens of one request read, at most `CHUNK` of them; `kept` is its state, by groups."""
    amounts, writing, reading, logs, _ = tokens
    amounts, writing, reading = (
        amounts.movedim(0, 2),
        writing.transpose(0, 1)[:, None],
        reading.transpose(0, 1)[:, None],
    )
    total = logs.movedim(0, 2).cumsum(-1)  # since the chunk's beginning, [num_groups, heads of a group, num_tokens]
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    read = ((reading @ writing.mT) * apart) @ amounts
    read.add_((reading @ kept.mT).mul_(total.exp()[..., None]))
    left = amounts * (total[..., -1:] - total).exp()[..., None]  # of what each has added, at the chunk's end
    kept.mul_(total[..., -1].exp()[..., None, None]).add_(left.mT @ writing)
    return read.movedim(2, 0)
