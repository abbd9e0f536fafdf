"""Layers that keep one state for a request, however long it is, in place of keys and values of each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


class StatePart(NamedTuple):
    """A part of what one layer keeps for a request."""

    shape: tuple[int, ...]  # ranks share the first dimension: heads, or channels
    is_wide: bool  # float32, whatever the model's dtype


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
        kept = (self.num_value_heads, self.key_dim, self.value_dim)
        return StatePart((self.num_channels, self.conv_width - 1), is_wide=False), StatePart(kept, is_wide=True)

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


Mixer = DeltaNet
GateActivation = Literal["silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Which layers keep a state, and how they mix a token with it."""

    layers: tuple[int, ...]  # ascending
    mixer: Mixer
    gate: GateActivation = "silu"  # of what mixing returns, once it is normed

    def of_rank(self, num_ranks: int) -> Recurrent:
        """Return the share of one of several ranks."""
        return replace(self, mixer=self.mixer.of_rank(num_ranks))
