"""Rows of numbers that clients gave in place of embeddings: as a step has them, and of which models they may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.common.arrays import F32, I64

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig


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
