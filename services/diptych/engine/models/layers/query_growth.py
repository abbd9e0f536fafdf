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
    factors: Tensor  # [context_len // period + 1], looked up: so a token's does not depend on its batch

    @staticmethod
    def build(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> GrowingQueries | None:
        """Return the model's; None if its queries stay as they are."""
        growth = config.query_growth
        if growth is None:
            return None
        whole_periods = torch.arange(config.context_len // growth.period + 1, dtype=torch.float32)
        factors = whole_periods.log1p() * growth.factor + 1.0
        return GrowingQueries(config.num_heads * config.head_dim, growth.period, factors.to(device, dtype))

    def apply(self, qkv: Tensor, positions: Tensor) -> None:
        """Multiply the queries of `qkv`, as in `AttentionBackend`, in place; `positions` `[num_tokens]`."""
        qkv[:, : self.size].mul_(self.factors[positions // self.period][:, None])
