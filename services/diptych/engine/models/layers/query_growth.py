"""What a layer's queries are multiplied by where they grow with the text before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.matrices.weights import Weights


class Growth(Protocol):
    """Makes queries grow."""

    def apply(self, qkv: Tensor, positions: Tensor) -> None:
        """Multiply the queries of `qkv`, as in `AttentionBackend`, in place; `positions` `[num_tokens]`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GrowingQueries:
    """See `QueryGrowth`."""

    size: int  # of all queries of a token
    period: int
    ahead: int  # 1: a token counts as before itself
    factors: Tensor  # float32 [context_len // period + 1], looked up: so a token's does not depend on its batch

    @staticmethod
    def build(config: ModelConfig, layer: int, device: torch.device) -> GrowingQueries | None:
        """Return the layer's; None if its queries stay as they are."""
        growth = config.query_growth
        if growth is None or (growth.still_only and not config.rope_of(layer).is_still):
            return None
        whole_periods = torch.arange(config.context_len // growth.period + 1, dtype=torch.float32)
        factors = whole_periods.log1p() * growth.factor + 1.0
        size = config.num_heads * config.head_dim
        return GrowingQueries(size, growth.period, int(growth.counts_itself), factors.to(device))

    def apply(self, qkv: Tensor, positions: Tensor) -> None:
        qkv[:, : self.size].mul_(self.factors[(positions + self.ahead) // self.period][:, None])


@dataclass(frozen=True, slots=True, eq=False)
class HeadGrowth:
    """Each head's queries, by `scale * ln(position + 1) + bias`, which it has learned."""

    start: int  # of queries in a row
    head_dim: int
    scale: Tensor  # [num_heads]
    bias: Tensor

    def apply(self, qkv: Tensor, positions: Tensor) -> None:
        queries = qkv[:, self.start : self.start + len(self.scale) * self.head_dim]
        logs = (positions + 1).double().log().to(qkv.dtype)  # of doubles: rounded alike wherever a token stands
        factors = self.scale * logs[:, None] + self.bias
        queries.view(len(qkv), -1, self.head_dim).mul_(factors[..., None])


@dataclass(frozen=True, slots=True, eq=False)
class LearnedGrowth:
    """See `ModelConfig.learned_growth`."""

    parts: tuple[HeadGrowth, ...]  # of attention's queries, and of an indexer's

    @staticmethod
    def build(config: ModelConfig, weights: Weights, layer: int) -> LearnedGrowth:
        parts = [_heads(weights, f"{layer}.growth", 0, config.head_dim)]
        if config.indexer is not None and config.chooses(layer):
            parts.append(_heads(weights, f"{layer}.index_growth", config.states_size, config.indexer.head_dim))
        return LearnedGrowth(tuple(parts))

    def apply(self, qkv: Tensor, positions: Tensor) -> None:
        for part in self.parts:
            part.apply(qkv, positions)


def _heads(weights: Weights, name: str, start: int, head_dim: int) -> HeadGrowth:
    return HeadGrowth(start, head_dim, weights.constant(f"{name}_scale"), weights.constant(f"{name}_bias"))


def new_growth(config: ModelConfig, weights: Weights, layer: int, device: torch.device) -> Growth | None:
    """Return how the queries of `layer` grow; None if they stay as they are."""
    if config.learned_growth:
        return LearnedGrowth.build(config, weights, layer)
    return GrowingQueries.build(config, layer, device)
