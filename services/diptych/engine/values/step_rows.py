"""Rows of numbers that clients gave in place of embeddings: as a step has them, and of which models they may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.common.arrays import F32, I64

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig

LARGEST: Final = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Those of all chunks of a step."""

    tokens: I64  # [num_rows]: indices into the step's `input_ids`, ascending
    values: F32  # [num_rows, hidden_size]


def row_width(model: ModelConfig) -> int:
    """Return how many numbers a row has that clients may give in place of a token's embedding; 0: they may give none.

    Layers that are told the token itself would be told none, and a model that guesses for this one sees tokens alone.
    """
    takes_rows = model.pooling is None and not model.per_layer_dim and model.draft is None
    return model.hidden_size if takes_rows else 0


def row_limit(model: ModelConfig, dtype: str) -> float:
    """Return how large a number of such a row may be, which is read in `dtype`: finite there, multiplied or not."""
    return LARGEST[dtype] / max(1.0, abs(model.embedding_scale)) if model.scales_given_rows else LARGEST[dtype]
