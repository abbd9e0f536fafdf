"""The delta rule whose state decays by each channel of its keys (Kimi Linear, arXiv 2510.26692), in float32.

A head keeps a matrix `[key dimensions, value dimensions]`. A token lets each of its rows decay, looks up what is there
for its key, and corrects that towards its value, by a part `beta`. A chunk of tokens is computed at once: what each
corrects is found by solving a triangular system, as chunks of the gated delta rule are (arXiv 2412.06464).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from diptych.engine.models.arithmetic.delta_rule import silu, softplus
from diptych.engine.models.layers.routing import logistic

CHUNK: Final = 32  # tokens of a prompt that are computed together
NORM_EPS: Final = 1e-6  # of queries and keys, in every model


class Decay(NamedTuple):
    """How fast states decay, by the layer."""

    rate: Tensor  # float32 [num_heads]
    bias: Tensor  # float32 [num_heads, head_dim], added to what a token says


class Prepared(NamedTuple):
    """What the rule is given of tokens, in float32."""

    queries: Tensor  # [num_tokens, num_heads, head_dim], as all others but the last
    keys: Tensor
    values: Tensor
    logs: Tensor  # of decays, at most 0
    betas: Tensor  # [num_tokens, num_heads]


def in_chunks(mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, out: Tensor) -> None:
    """Compute several tokens of one request: `out`, `[num_tokens, num_heads, head_dim]`, and its `state`, in place.

    `mixed` is float32 `[num_tokens, num_heads, 3 * head_dim]`: queries, keys and values behind the convolution, before
    SiLU; `decays` `[num_tokens, num_heads, head_dim]` and `betas` `[num_tokens, num_heads]` are as they are projected.
    `state` is float32 `[num_heads, head_dim, head_dim]`.
    """
    prepared = prepare(mixed, decays, betas, decay)
    for start in range(0, len(mixed), CHUNK):
        chunk = Prepared(*(each[start : start + CHUNK] for each in prepared))
        out[start : start + CHUNK] = _chunk(chunk, state)


def step(mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, slots: Tensor, out: Tensor) -> None:
    """Compute one token of each of several requests, a token of `in_chunks`; `state` is `[num_slots, ...]`."""
    kept = state[slots]
    out.copy_(_token(prepare(mixed, decays, betas, decay), kept))
    state[slots] = kept


def prepare(mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay) -> Prepared:
    """Make it of what `in_chunks` is given: each token by itself, to the bit."""
    queries, keys, values = silu(mixed).chunk(3, dim=-1)
    logs = softplus(decays.float() + decay.bias).mul_(-decay.rate[:, None])
    queries = _normed(queries).mul_(queries.shape[-1] ** -0.5)
    return Prepared(queries, _normed(keys), values, logs, logistic(betas.float()))


def _normed(x: Tensor) -> Tensor:
    lengths = (x * x).sum(-1, keepdim=True).add_(NORM_EPS).sqrt_()
    return x / lengths


def _token(tokens: Prepared, kept: Tensor) -> Tensor:
    """Return what tokens of several requests read; `kept` are these requests' states."""
    queries, keys, values, logs, betas = tokens
    kept.mul_(logs.exp()[..., None])
    found = (kept * keys[..., None]).sum(-2)
    deltas = (values - found) * betas[..., None]
    kept.add_(keys[..., None] * deltas[..., None, :])
    read = kept * queries[..., None]
    return read.sum(-2)


def _chunk(tokens: Prepared, state: Tensor) -> Tensor:
    """Return what the tokens of one request read, at most `CHUNK` of them."""
    queries, keys, values, logs, betas = (each.transpose(0, 1) for each in tokens)
    total = logs.cumsum(1)  # since the chunk's beginning
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)[..., None]
    apart = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    seen_keys = (
        keys[:, None] * apart
    )  # [num_heads, num_tokens, num_tokens, head_dim]: of each as each later one sees it
    overlaps = (keys[:, :, None] * seen_keys).sum(-1).mul_(betas[..., None])
    wanted = (values - (keys * total.exp()) @ state).mul_(betas[..., None])
    deltas = torch.linalg.solve_triangular(overlaps, wanted, upper=False, unitriangular=True)
    scores = (queries[:, :, None] * seen_keys).sum(-1)
    read: Tensor = (queries * total.exp()) @ state + scores @ deltas
    left = (total[:, -1:] - total).exp()  # of what each has written, at the chunk's end
    state.mul_(total[:, -1].exp()[..., None]).add_((keys * left).mT @ deltas)
    return read.transpose(0, 1)
