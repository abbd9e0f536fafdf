"""The tokens of a batch by what they share, such as an adapter, in tiles of equal size for a GPU.

How many tiles there may be follows from the number of tokens, so a recorded step has the same arrays whoever is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

FEW_TOKENS: Final = 256  # up to here tiles are as small as tensor cores have them: their weights are what is read
SMALL_TILE: Final = 16
LARGE_TILE: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class TokenTiles:
    """Tile i is the tokens `tokens[first : first + count]`, all of one slot, where `tiles[i]` is slot, first, count.

    A tile with a count of 0 is none. A token without a slot is in no tile.
    """

    tokens: Tensor  # int32 [num_tokens]: by slot, then ascending; behind them those without one
    tiles: Tensor  # int32 [max_tiles, 3]

    @property
    def size(self) -> int:
        """The most tokens of a tile."""
        return tile_size(len(self.tokens))

    @staticmethod
    def of(owner: I64, num_slots: int, device: torch.device) -> TokenTiles:
        """Return the tiles on `device`; see `tile_tokens`."""
        tokens, tiles = tile_tokens(owner, num_slots)
        return TokenTiles(torch.from_numpy(tokens).to(device), torch.from_numpy(tiles).to(device))


def tile_size(num_tokens: int) -> int:
    """Return the most tokens of a tile in a batch of so many."""
    return SMALL_TILE if num_tokens <= FEW_TOKENS else LARGE_TILE


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Return how many tiles so many tokens have at most: each slot has one that is not full."""
    return min(num_tokens, num_tokens // tile_size(num_tokens) + num_slots)


def tile_tokens(owner: I64, num_slots: int) -> tuple[I32, I32]:
    """Return the two arrays of `TokenTiles` for tokens of these slots, `-1 <= owner < num_slots`."""
    size, counts = tile_size(len(owner)), np.bincount(owner + 1, minlength=num_slots + 1)[1:]
    tokens = np.argsort(np.where(owner < 0, num_slots, owner), kind="stable").astype(np.int32)
    per_slot = -(-counts // size)
    slots = np.repeat(np.arange(num_slots), per_slot)
    index = np.arange(len(slots)) - (np.cumsum(per_slot) - per_slot)[slots]  # of a tile in its slot
    tiles = np.zeros((max_tiles(len(owner), num_slots), 3), np.int32)
    first = (np.cumsum(counts) - counts)[slots] + index * size
    tiles[: len(slots)] = np.stack([slots, first, np.minimum(size, counts[slots] - index * size)], axis=1)
    return tokens, tiles
