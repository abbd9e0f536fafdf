"""When prompts attend to keys and values that are made of latents, and in which pieces these are made.

For each pair of a query and a key a head multiplies `nope + rope + value` numbers in place of `2 * rank + rope`: 320
in place of 1,088 in DeepSeek V3. Making a key and a value takes `rank * (nope + value)`, as many as 171 queries save
there. A long context is made in pieces, again for each block of queries, so memory has a bound that no length moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych.architectures.config import Latent
from diptych.common.arrays import I64

MADE_NBYTES: Final = 256 << 20  # keys and values of a piece
FOUND_NBYTES: Final = 128 << 20  # what a block of queries has found, in float32
MIN_NEW_TOKENS: Final = 256  # of each request: every one takes launches of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a request, and a part of their context. Both count from the request's first."""

    tokens: slice  # of its new tokens
    keys: slice  # of its whole text, from a page's first token on


@dataclass(frozen=True, slots=True)
class Decompression:
    """Counts for the layers of one model on one rank."""

    latent: Latent
    num_heads: int
    itemsize: int  # of states
    page_size: int
    context_len: int

    @property
    def piece_len(self) -> int:
        """Keys of a piece at most: whole pages."""
        made = self.num_heads * (self.latent.nope_dim + self.latent.value_dim) * self.itemsize
        num_pages = max(1, min(MADE_NBYTES // made, self.context_len) // self.page_size)
        return num_pages * self.page_size

    @property
    def block_len(self) -> int:
        """Queries of a block at most."""
        return max(1, min(FOUND_NBYTES // (4 * self.num_heads * self.latent.value_dim), self.context_len))

    def pays(self, new_lens: I64, seq_lens: I64) -> bool:
        """Whether requests of such lengths take fewer operations so. Both `[batch_size]`, with the new tokens."""
        latent = self.latent
        if new_lens.min() < MIN_NEW_TOKENS:
            return False
        pairs = (new_lens * (2 * seq_lens - new_lens + 1) // 2).sum()
        num_made = (-(-new_lens // self.block_len) * seq_lens).sum()
        made = pairs * (latent.query_dim + latent.value_dim) + num_made * latent.rank * (
            latent.nope_dim + latent.value_dim
        )
        return bool(made < pairs * (latent.rank + latent.key_dim))

    def pieces(self, new_len: int, seq_len: int) -> Iterator[Piece]:
        """Yield what is computed of a request, in this order."""
        for begin in range(0, new_len, self.block_len):
            end = min(begin + self.block_len, new_len)
            context = seq_len - new_len + end
            for first in range(0, context, self.piece_len):
                yield Piece(slice(begin, end), slice(first, min(first + self.piece_len, context)))
