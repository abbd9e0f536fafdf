"""The gated delta rule behind a short convolution, as an interface, and its torch implementation (arXiv 2412.06464).

A value head keeps a matrix `[key_dim, value_dim]`. A token lets it fade, by `exp(g)`, and corrects what its key finds
in it towards the token's value, by `beta`: `S = exp(g) * S; S += k * (beta * (v - k @ S)).T`. What its query finds then
is normed and weighed by its gate. Queries and keys are of length 1, queries divided by the root of `key_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.short_conv import convolve
from diptych.engine.models.layers.routing import logistic

CHUNK: Final = 64  # tokens of a prompt that are computed together
UNIT_EPS: Final = 1e-6  # added to the square of the length of a query, or key


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a layer has beside its matrices."""

    conv: Tensor  # [num_channels, conv_width], the newest token's last
    decay: Tensor  # float32 [num_value_heads]: below 0
    decay_bias: Tensor  # float32 [num_value_heads]
    norm: Tensor  # [value_dim]
    eps: float


class DeltaRule(Protocol):
    """What is between the projections of such a layer."""

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        """See `StateMixer.mix`. A token of `projected` is `[channels | gates | numbers of beta | of g]`."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the rule is given of one request's tokens, all in float32, heads first."""

    queries: Tensor  # [num_value_heads, num_tokens, key_dim]
    keys: Tensor
    values: Tensor  # [num_value_heads, num_tokens, value_dim]
    g: Tensor  # [num_value_heads, num_tokens]: logarithms of what remains
    beta: Tensor  # [num_value_heads, num_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class TorchDeltaRule:
    """Any dtype on any device, request by request: the reference. It waits to know their slots."""

    net: DeltaNet
    weights: DeltaWeights

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        assert batch.state_slots is not None
        start = 0
        for slot, length in zip(batch.state_slots.tolist(), batch.host.extend_lens.tolist(), strict=True):
            rows = slice(start, start + length)
            if slot >= 0:
                self._mix_one(projected[rows], state[0][slot], state[1][slot], out[rows])
            start += length

    def _mix_one(self, projected: Tensor, newest: Tensor, kept: Tensor, out: Tensor) -> None:
        net = self.net
        sizes = [net.num_channels, net.out_size, net.num_value_heads, net.num_value_heads]
        channels, gates, beta, g = torch.split(projected, sizes, dim=1)
        mixed = silu(convolve(channels, newest, self.weights.conv.float(), None))
        tokens = self._tokens(mixed, beta.float(), g.float())
        found = recur(tokens, kept) if len(projected) == 1 else in_chunks(tokens, kept)
        scales = found.pow(2).mean(-1, keepdim=True).add_(self.weights.eps).rsqrt_()
        normed = (found * scales * self.weights.norm.float()).transpose(0, 1)
        out.copy_(normed.flatten(1) * silu(gates.float()))

    def _tokens(self, channels: Tensor, beta: Tensor, g: Tensor) -> Tokens:
        net, num_tokens = self.net, len(channels)
        size, shared = net.num_key_heads * net.key_dim, net.num_value_heads // net.num_key_heads
        queries, keys = (
            unit(part.view(num_tokens, -1, net.key_dim)).repeat_interleave(shared, dim=1).transpose(0, 1)
            for part in (channels[:, :size], channels[:, size : 2 * size])
        )
        values = channels[:, 2 * size :].view(num_tokens, -1, net.value_dim).transpose(0, 1)
        decay = self.weights.decay * softplus(g + self.weights.decay_bias)
        return Tokens(queries * net.key_dim**-0.5, keys, values, decay.T, logistic(beta).T)


def recur(tokens: Tokens, kept: Tensor) -> Tensor:
    """Return what is found, `[num_value_heads, num_tokens, value_dim]`; bring `kept` up to date, token by token."""
    found = torch.empty_like(tokens.values)
    for i in range(tokens.values.shape[1]):
        key = tokens.keys[:, i, :, None]
        kept.mul_(tokens.g[:, i, None, None].exp())
        change = (tokens.values[:, i] - (kept * key).sum(dim=1)) * tokens.beta[:, i, None]
        kept.add_(key * change[:, None])
        found[:, i] = (kept * tokens.queries[:, i, :, None]).sum(dim=1)
    return found


def in_chunks(tokens: Tokens, kept: Tensor) -> Tensor:
    """As `recur`, up to rounding, with products of matrices."""
    found = torch.empty_like(tokens.values)
    for start in range(0, found.shape[1], CHUNK):
        inside = slice(start, start + CHUNK)
        parts = (tokens.queries, tokens.keys, tokens.values, tokens.g, tokens.beta)
        found[:, inside] = _of_chunk(Tokens(*(part[:, inside] for part in parts)), kept)
    return found


def _of_chunk(tokens: Tokens, kept: Tensor) -> Tensor:
    """Solve for the changes that all tokens of the chunk make, then apply them at once (section 3.3 of the paper)."""
    total = tokens.g.cumsum(-1)
    since = total[:, :, None] - total[:, None]
    remains = since.masked_fill(torch.ones_like(since[0], dtype=torch.bool).triu(1), -torch.inf).exp()
    weighed = tokens.keys * tokens.beta[..., None]
    system = weighed @ tokens.keys.mT * remains
    wanted = tokens.values * tokens.beta[..., None] - weighed * total.exp()[..., None] @ kept
    changes: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    queries = tokens.queries * total.exp()[..., None]
    found = queries @ kept + (tokens.queries @ tokens.keys.mT * remains) @ changes
    late = tokens.keys * (total[:, -1:] - total).exp()[..., None]
    kept.mul_(total[:, -1].exp()[:, None, None]).add_(late.mT @ changes)
    return found


def silu(x: Tensor) -> Tensor:
    return x * logistic(x)


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + x.abs().neg_().exp_().log1p_()


def unit(x: Tensor) -> Tensor:
    """Return vectors of length 1 in the directions of the last dimension's."""
    return x * (x.pow(2).sum(-1, keepdim=True) + UNIT_EPS).rsqrt_()
