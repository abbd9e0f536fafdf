"""What a model's tower is: the part that makes rows of hidden states out of an image, in place of embeddings of tokens.

It has no keys and values to keep. Every rank of a tensor-parallel group has all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from diptych.common.errors import ConfigError

TowerActivation = Literal["silu", "gelu_tanh"]
MAX_SIZES: Final = {"depth": 1 << 8, "hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_heads": 1 << 8}


@dataclass(frozen=True, slots=True)
class Sections:
    """How the pairs of dimensions of a head that rotate are shared by time, height and width (M-RoPE, 2409.12191)."""

    sizes: tuple[int, int, int]  # pairs; together all of a head's
    interleaved: bool = False  # time, height, width take turns, as long as the latter have some; else one by one

    def axes(self) -> tuple[int, ...]:
        """Return of each pair whether it turns by time (0), height (1) or width (2)."""
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sizes) for _ in range(size))
        num_pairs = sum(self.sizes)
        return tuple(pair % 3 if pair < 3 * self.sizes[pair % 3] else 0 for pair in range(num_pairs))


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision transformer: Qwen's towers, whose positions rotate, of height and width; or SigLIP's."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    out_size: int  # of the text's hidden states
    patch_size: int  # pixels
    merge_size: int  # patches of a side that become one row
    num_frames: int  # of a patch's kernel: an image is that many equal ones; 0: it has no frames
    activation: TowerActivation
    gated: bool  # a feed-forward network has gates, and norms do not subtract the mean
    window: int = 0  # rows of the result in the side of a window; 0: there are none
    full_layers: frozenset[int] = frozenset()  # in which a patch sees all others, not only those of its window
    num_positions: int = 0  # of a square of learned ones, stretched to the image; 0: positions only rotate
    rotates: bool = True
    is_averaged: bool = False  # patches become one row as their mean, normed as the text and multiplied once
    taps: tuple[int, ...] = ()  # layers behind which rows are taken for the first layers of the text, too

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def row_nbytes(self, itemsize: int) -> int:
        """Return the bytes of what is made of a place of the prompt, of numbers of so many bytes."""
        return (1 + len(self.taps)) * self.out_size * itemsize

    @property
    def merged_size(self) -> int:
        """The numbers of the patches that become one row."""
        return self.hidden_size * self.merge_size**2

    def validate(self, hidden_size: int) -> None:
        """Raise `ConfigError` for what can't be computed; `hidden_size` is the text's."""
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ConfigError(f"vision_config: {self.num_heads} heads do not share {self.hidden_size} evenly")
        if self.out_size != hidden_size:
            raise ConfigError(f"vision_config: rows of {self.out_size} are no hidden states of {hidden_size}")
        if math.isqrt(self.num_positions) ** 2 != self.num_positions:
            raise ConfigError(f"vision_config: {self.num_positions} positions make no square")
        if any(not 0 <= layer < self.num_layers for layer in (*self.taps, *self.full_layers)):
            raise ConfigError(f"vision_config names layers that are none of its {self.num_layers}")
