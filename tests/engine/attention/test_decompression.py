from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from diptych.architectures.config import Latent
from diptych.engine.attention.decompression import FOUND_NBYTES, MADE_NBYTES, Decompression

LATENT: Final = Latent(1536, 512, 128, 64, 128, interleaved=True, norm_eps=1e-6)  # DeepSeek V3's
WHOLE: Final = Decompression(LATENT, 128, 2, 64, 163_840)


@pytest.mark.parametrize(
    ("new_lens", "seq_lens", "pays"),
    [
        ([4096], [4096], True),
        ([512], [32_768], True),
        ([256], [4096], True),
        ([256], [256], False),  # a query sees 128 keys in the mean, and each has to be made
        ([255, 4096], [4096, 4096], False),  # every request has launches of its own
        ([300, 300], [350, 9000], True),
    ],
)
def test_it_pays_where_it_takes_fewer_operations_and_nobody_has_few_tokens(
    new_lens: list[int], seq_lens: list[int], pays: bool
) -> None:
    assert WHOLE.pays(np.array(new_lens), np.array(seq_lens)) is pays


@pytest.mark.parametrize("num_heads", [16, 128])
def test_memory_has_a_bound_that_no_length_moves(num_heads: int) -> None:
    plan = Decompression(LATENT, num_heads, 2, 64, 163_840)
    assert plan.piece_len % 64 == 0
    assert MADE_NBYTES / 2 < plan.piece_len * num_heads * 256 * 2 <= MADE_NBYTES
    assert plan.block_len * num_heads * 128 * 4 <= FOUND_NBYTES


def test_a_short_context_takes_no_more_than_it_has() -> None:
    plan = Decompression(LATENT, 16, 2, 64, 1000)
    assert (plan.piece_len, plan.block_len) == (960, 1000)


def test_every_query_meets_every_key_up_to_its_own_once_and_in_order() -> None:
    plan, new_len, seq_len = Decompression(LATENT, 128, 2, 64, 163_840), 5000, 20_000
    met: dict[tuple[int, int], list[slice]] = {}
    for piece in plan.pieces(new_len, seq_len):
        met.setdefault((piece.tokens.start, piece.tokens.stop), []).append(piece.keys)
    blocks = list(met)
    assert [begin for begin, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == new_len
    for (_, end), keys in met.items():
        assert [each.start for each in keys] == [0, *(each.stop for each in keys[:-1])]
        assert keys[-1].stop == seq_len - new_len + end
        assert all(each.start % plan.page_size == 0 for each in keys)
