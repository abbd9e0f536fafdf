"""What a layer's queries are multiplied by where they grow with the text before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig


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
        """Multiply the queries of `qkv`, as in `AttentionBackend`, in place; `positions` `[num_tokens]`."""
        qkv[:, : self.size].mul_(self.factors[(positions + self.ahead) // self.period][:, None])
