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
    return Ends(
        weights.matrix("embed") if config.has_first_layer else _ELSEWHERE,
        weights.matrix("lm_head") if config.has_last_layer else _ELSEWHERE,
        PerLayerInputs.build(config, weights, ops, dtype),
        new_norm(config, weights, ops, "0.input_norm") if config.pre_norms else None,
    )
