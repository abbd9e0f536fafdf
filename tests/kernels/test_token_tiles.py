from __future__ import annotations

import numpy as np
import pytest

from diptych.kernels.token_tiles import FEW_TOKENS, LARGE_TILE, SMALL_TILE, tile_tokens

NUM_SLOTS = 5


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 100, FEW_TOKENS, FEW_TOKENS + 1, 1000])
@pytest.mark.parametrize("lowest", [-1, 0])
def test_each_token_with_a_slot_is_in_one_tile_of_its_slot(num_tokens: int, lowest: int) -> None:
    owner = np.random.default_rng(num_tokens).integers(lowest, NUM_SLOTS, num_tokens)
    tokens, tiles = tile_tokens(owner, NUM_SLOTS)
    found: list[int] = []
    for slot, first, count in tiles.tolist():
        mine = tokens[first : first + count].tolist()
        assert all(owner[token] == slot for token in mine)
        assert mine == sorted(mine)
        assert count <= (SMALL_TILE if num_tokens <= FEW_TOKENS else LARGE_TILE)
        found += mine
    assert sorted(found) == np.flatnonzero(owner >= 0).tolist()
    assert sorted(tokens.tolist()) == list(range(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 8, 40, 700])
def test_the_arrays_of_so_many_tokens_are_of_one_size_whoever_they_belong_to(num_tokens: int) -> None:
    worst = np.arange(num_tokens) % NUM_SLOTS
    shapes = {
        tuple(each.shape for each in tile_tokens(owner, NUM_SLOTS))
        for owner in (worst, np.zeros_like(worst), np.full_like(worst, -1))
    }
    assert len(shapes) == 1
