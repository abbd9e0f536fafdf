"""What an encoder's layers are, beside what `ModelConfig` says of all models: the classes of BERT and ModernBERT.

They have no keys and values to keep: a prompt is computed at once, and every token sees all others, or those within a
window on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Norms subtract the mean. With learned positions nothing rotates."""

    num_positions: int = 0  # that are learned; 0: none are, and queries and keys rotate
    first_position: int = 0  # which of them is the first token's
    num_types: int = 0  # of tokens: learned for the texts of a pair
    separator: int = -1  # a token behind which the second text of a pair begins; -1: all tokens are of type 0
    norms_behind: bool = True  # what a block adds is added, then normed; else what goes into a block is normed
    gated: bool = False  # a feed-forward network has gates
    activation: EncoderActivation = "gelu"
    norm_bias: bool = True
    attention_bias: bool = True
