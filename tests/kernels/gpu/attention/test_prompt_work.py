from __future__ import annotations

import numpy as np
import pytest

from diptych.kernels.gpu.attention.prompt_work import FIXED_TURNS, I32, NOTHING, SECTION_NBYTES, share_work

GROUP, HEADS, ROWS, KEYS, PROGRAMS = 3, 2, 128, 64, 132
STEPS = {
    "one prompt": ([4096], [4096]),
    "a chunk behind a long prefix": ([1024], [32_768]),
    "ragged": ([700, 0, 1, 3000, 43], [9000, 5, 1, 3000, 43]),
    "fewer tiles than programs": ([40, 90], [40, 400]),
}


def shared(extend_lens: list[int], seq_lens: list[int], token_nbytes: int = 512) -> I32:
    lens = np.array(extend_lens), np.array(seq_lens)
    return share_work(*lens, GROUP, HEADS, ROWS, KEYS, token_nbytes, PROGRAMS)


@pytest.mark.parametrize("step", STEPS)
def test_each_tile_of_each_head_is_computed_once(step: str) -> None:
    items = [tuple(item[:3]) for item in shared(*STEPS[step]).tolist() if item[1] != NOTHING]
    assert sorted(items) == [
        (request, head, first_row)
        for request, extend_len in enumerate(STEPS[step][0])
        for head in range(HEADS)
        for first_row in range(0, extend_len * GROUP, ROWS)
    ]


def test_what_is_no_item_has_a_request_and_a_row_that_exist() -> None:
    lists = shared(*STEPS["fewer tiles than programs"])
    assert lists.shape == (PROGRAMS, 4)
    assert {tuple(item) for item in lists[lists[:, 1] == NOTHING].tolist()} == {(0, NOTHING, 0, 0)}


@pytest.mark.parametrize("step", STEPS)
def test_no_program_has_more_to_do_than_the_mean_and_a_tile(step: str) -> None:
    lists, (extend_lens, seq_lens) = shared(*STEPS[step]), map(np.array, STEPS[step])
    request, head, first_row, _ = lists.T
    last = np.minimum((first_row + ROWS - 1) // GROUP, extend_lens[request] - 1)
    turns = (seq_lens - extend_lens)[request] + last + 1
    costs = np.where(head == NOTHING, 0, -(-turns // KEYS) + FIXED_TURNS).reshape(-1, PROGRAMS)
    assert costs.sum(axis=0).max() <= costs.sum(axis=0).mean() + costs.max()


def test_heads_whose_keys_and_values_fill_the_cache_follow_each_other() -> None:
    lists = shared([30_000, 1000], [30_000, 1000], token_nbytes=SECTION_NBYTES // 30_000)
    heads = [tuple(item[:2]) for item in lists.tolist() if item[1] != NOTHING]
    assert sorted(set(heads), key=heads.index) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert heads.index((0, 1)) >= PROGRAMS * (30_000 * GROUP // ROWS // PROGRAMS)


def test_a_step_without_tokens_is_no_work() -> None:
    assert shared([0], [5]).shape == (0, 4)
