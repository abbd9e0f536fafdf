"""What is before and behind the layers of a decoder, as far as its process has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.layer_end import PerLayerInputs
from diptych.engine.models.layers.norm import Norm, new_norm
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class Ends:
    """Embeddings, the output projection, and the norm that the first layer's input goes through."""

    embed: Matrix
    lm_head: Matrix
    per_layer: PerLayerInputs | None
    input_norm: Norm | None
    embedding_scale: Tensor | None = None
    output_size: int = 0
    logits_divisor: float = 1
    logits_softcap: float = 0  # 0: none

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Return rows for tokens, as the first layer is given them."""
        x = self.embed.rows(input_ids)
        return x if self.embedding_scale is None else x.mul_(self.embedding_scale)

    def logits(self, normed: Tensor) -> Tensor:
        """Return `[num_rows, output_size]` of what comes out of the last norm."""
        logits = normed.new_empty(len(normed), self.output_size)
        self.lm_head.multiply(normed, logits)
        if self.logits_divisor != 1:
            logits.div_(self.logits_divisor)
        cap = self.logits_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class _Absent:
    """Implements `Matrix` where there is none any more, or another stage has it."""

    def __init__(self, why: str) -> None:
        self._why = why

    def multiply(self, x: Tensor, out: Tensor) -> None:
        raise AssertionError(self._why)

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError(self._why)


_ELSEWHERE: Final = _Absent("another stage has this matrix")
_RELEASED: Final = _Absent("the weights were released")
RELEASED: Final = Ends(_RELEASED, _RELEASED, None, None)


def new_ends(config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype) -> Ends:
    """Return what there is of them here: the first stage of a pipeline has embeddings, the last one the projection."""
    scale = config.embedding_scale
    return Ends(
        weights.matrix("embed") if config.has_first_layer else _ELSEWHERE,
        weights.matrix("lm_head") if config.has_last_layer else _ELSEWHERE,
        PerLayerInputs.build(config, weights, ops, dtype),
        new_norm(config, weights, ops, "0.input_norm") if config.pre_norms else None,
        None if scale == 1 else torch.tensor(scale, dtype=dtype),  # rounded, as in training
        config.output_size,
        config.logits_divisor,
        config.logits_softcap or 0,
    )
