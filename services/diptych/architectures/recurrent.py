"""Layers that keep one state for a request, however long it is, in place of keys and values of each of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

MOST_CHANNELS: Final = 16  # of a short convolution, that are never divided


class StatePart(NamedTuple):
    """A part of what one layer keeps for a request."""

    shape: tuple[int, ...]  # ranks share the first dimension: heads, or channels
    is_wide: bool  # float32, whatever the model's dtype
    sections: tuple[int, ...]  # of the first dimension, each of which ranks share


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The gated delta rule behind a short convolution (arXiv 2412.06464), as in Qwen3-Next."""

    num_key_heads: int  # each serves as many value heads as its neighbours
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int  # tokens that the convolution sees, the newest among them

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of a token, which the convolution mixes with those of the tokens before it."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The newest inputs of the convolution, `[num_channels, conv_width - 1]`; and what the delta rule keeps."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return (
            StatePart((self.num_channels, self.conv_width - 1), False, (keys, keys, values)),
            StatePart((self.num_value_heads, self.key_dim, self.value_dim), True, (self.num_value_heads,)),
        )

    @property
    def num_units(self) -> int:
        """Into how many equal parts a state can be cut: key heads with as many value heads each."""
        return math.gcd(self.num_key_heads, self.num_value_heads)

    @property
    def in_size(self) -> int:
        """The numbers of a token that mixing is given: channels, output gates, and two for each value head."""
        return self.num_channels + self.out_size + 2 * self.num_value_heads

    @property
    def out_size(self) -> int:
        """The numbers of a token that mixing returns."""
        return self.num_value_heads * self.value_dim

    @property
    def heads(self) -> dict[str, int]:
        """What ranks must be able to share, in words."""
        return {"key heads of a delta rule": self.num_key_heads, "value heads of a delta rule": self.num_value_heads}

    def of_rank(self, num_ranks: int) -> DeltaNet:
        """Return the share of one of several ranks."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
        )


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """The delta rule whose state decays by each channel of its keys (Kimi Linear, arXiv 2510.26692)."""

    num_heads: int
    head_dim: int  # of queries, keys and values
    conv_width: int  # tokens that the convolution sees, the newest among them

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The newest inputs of the convolution, a head's query, key and value behind each other; what the rule keeps.

        The latter is `[num_heads, key dimensions, value dimensions]`.
        """
        conv = (self.num_heads, 3 * self.head_dim, self.conv_width - 1)
        kept = (self.num_heads, self.head_dim, self.head_dim)
        return StatePart(conv, False, (self.num_heads,)), StatePart(kept, True, (self.num_heads,))

    @property
    def num_units(self) -> int:
        """Into how many equal parts a state can be cut."""
        return self.num_heads

    @property
    def in_size(self) -> int:
        """The numbers of a token that mixing is given: queries, keys, values, decays and gates; one for each head."""
        return 5 * self.out_size + self.num_heads

    @property
    def out_size(self) -> int:
        """The numbers of a token that mixing returns."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> dict[str, int]:
        """What ranks must be able to share, in words."""
        return {"heads of a delta rule": self.num_heads}

    def of_rank(self, num_ranks: int) -> KimiDelta:
        """Return the share of one of several ranks."""
        return replace(self, num_heads=self.num_heads // num_ranks)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space whose heads decay each by one number of a token (arXiv 2405.21060).

    The heads of a group are written and read by the same two vectors of a token, and normed together.
    """

    num_heads: int
    head_dim: int
    num_groups: int  # each of as many heads, neighbours
    state_size: int  # of the two vectors
    conv_width: int  # tokens that the convolution sees, the newest among them
    min_step: float  # the least that a token's step can be
    conv_bias: bool = True

    @property
    def group_channels(self) -> int:
        """What the convolution mixes of a group: its heads, and the two vectors."""
        return self.out_size // self.num_groups + 2 * self.state_size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The newest inputs of the convolution, by groups; and the state of each head."""
        conv = (self.num_groups, self.group_channels, self.conv_width - 1)
        kept = (self.num_heads, self.head_dim, self.state_size)
        return StatePart(conv, False, (self.num_groups,)), StatePart(kept, True, (self.num_heads,))

    @property
    def num_units(self) -> int:
        """Into how many equal parts a state can be cut: groups with their heads."""
        return self.num_groups

    @property
    def in_size(self) -> int:
        """The numbers of a token that mixing is given: gates, heads, vectors, and the step of each head."""
        return 2 * self.out_size + 2 * self.num_groups * self.state_size + self.num_heads

    @property
    def out_size(self) -> int:
        """The numbers of a token that mixing returns."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> dict[str, int]:
        """What ranks must be able to share, in words. Each has whole groups: their heads are normed together."""
        return {"groups of a state space": self.num_groups}

    def of_rank(self, num_ranks: int) -> Mamba2:
        """Return the share of one of several ranks."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=self.num_groups // num_ranks)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short convolution between two gates, which is all (LFM2)."""

    num_channels: int
    conv_width: int  # tokens that the convolution sees, the newest among them
    has_bias: bool = False  # of the convolution and of what is before and behind it

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The newest inputs of the convolution."""
        return (StatePart((self.num_channels, self.conv_width - 1), False, (self.num_channels,)),)

    @property
    def num_units(self) -> int:
        """Into how many equal parts a state can be cut: blocks of some channels."""
        return self.num_channels // self.block

    @property
    def block(self) -> int:
        """Channels that ranks do not divide: as many where a rank has some of them as where it has all."""
        return math.gcd(self.num_channels, MOST_CHANNELS)

    @property
    def in_size(self) -> int:
        """The numbers of a token that mixing is given: gates of what goes in, gates of what comes out, and that."""
        return 3 * self.num_channels

    @property
    def out_size(self) -> int:
        """The numbers of a token that mixing returns."""
        return self.num_channels

    @property
    def heads(self) -> dict[str, int]:
        """What ranks must be able to share, in words."""
        return {f"blocks of {self.block} channels of a short convolution": self.num_units}

    def of_rank(self, num_ranks: int) -> ShortConv:
        """Return the share of one of several ranks."""
        return replace(self, num_channels=self.num_channels // num_ranks)


Mixer = DeltaNet | KimiDelta | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Which layers keep a state, and how they mix a token with it."""

    layers: tuple[int, ...]  # ascending
    mixer: Mixer

    def of_rank(self, num_ranks: int) -> Recurrent:
        """Return the share of one of several ranks."""
        return replace(self, mixer=self.mixer.of_rank(num_ranks))
