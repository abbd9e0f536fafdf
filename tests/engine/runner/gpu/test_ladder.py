"""Which steps are replayed, and what they are filled up with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diptych.engine.runner.gpu.ladder import fill_up, ladder, pad, rung_of, token_ladder, token_rung_of
from diptych.engine.values.batch import ForwardBatch, ForwardMode


def decode_batch(size: int) -> ForwardBatch:
    rows = np.arange(size)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=rows + 100,
        positions=rows + 16,
        out_slots=rows * 32 + 16,
        page_table=np.stack([2 * rows, 2 * rows + 1], axis=1).astype(np.int32),
        seq_lens=rows + 17,
        extend_lens=np.ones(size, np.int64),
        num_sampled=np.ones(size, np.int64),
    )


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 16, 17, 64, 100, 256, 1000])
def test_the_ladder_ends_at_the_largest_batch_and_wastes_less_than_half_and_little_where_rows_cost(
    max_batch: int,
) -> None:
    rungs = ladder(max_batch)
    assert rungs[-1] == max_batch
    assert list(rungs) == sorted(set(rungs))
    for size in range(1, max_batch + 1):
        rung = min(rung for rung in rungs if rung >= size)
        assert rung < 2 * size or rung == 1
        if size > 128:
            assert rung <= size * 1.25


def test_a_decode_step_takes_the_smallest_graph_that_holds_it() -> None:
    rungs = ladder(20)
    assert [rung_of(decode_batch(size), rungs) for size in (1, 3, 8, 9, 17, 20)] == [1, 4, 8, 16, 20, 20]
    assert rung_of(decode_batch(21), rungs) is None


def test_other_steps_are_launched_kernel_by_kernel() -> None:
    batch = decode_batch(2)
    assert rung_of(replace(batch, num_sampled=np.array([0, 1])), (2,)) is None
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert rung_of(replace(batch, mode=mode), (2,)) is None


@pytest.mark.parametrize("most", [1, 16, 17, 64, 100, 448, 500, 512, 1000, 2048])
def test_pieces_hold_as_many_tokens_as_they_may_and_waste_less_than_half_or_64_or_a_quarter(most: int) -> None:
    rungs = token_ladder(most)
    assert rungs[-1] == most
    assert list(rungs) == sorted(set(rungs))
    for size in range(1, rungs[-1] + 1):
        rung = min(rung for rung in rungs if rung >= size)
        assert rung <= 16 or rung < 2 * size
        assert rung - size < max(64, rung / 4)


def test_without_pieces_there_is_no_ladder() -> None:
    assert token_ladder(0) == ()


def test_a_small_step_with_prompts_takes_the_smallest_pieces_that_hold_it() -> None:
    rungs, batch = token_ladder(100), decode_batch(2)
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        steps = [replace(batch, mode=mode, input_ids=np.arange(size)) for size in (1, 16, 17, 65, 100, 101)]
        assert [token_rung_of(step, rungs) for step in steps] == [16, 16, 32, 100, 100, None]
    prompt = replace(batch, mode=ForwardMode.EXTEND)
    assert token_rung_of(replace(prompt, num_sampled=np.array([0, 1])), rungs) == 16
    assert token_rung_of(prompt, ()) is None
    assert token_rung_of(batch, rungs) is None, "it only decodes"


def test_tokens_are_filled_up_behind_the_own_ones() -> None:
    assert fill_up(np.array([7, -1]), 4).tolist() == [7, -1, 0, 0]
    assert fill_up(np.array([7, -1]), 2).tolist() == [7, -1]


def test_padding_rows_have_no_tokens_and_write_nowhere() -> None:
    batch = decode_batch(3)
    full = pad(batch, 5)
    assert full.batch_size == 5
    assert full.input_ids.tolist() == [100, 101, 102, 0, 0]
    assert full.positions.tolist() == [16, 17, 18, 0, 0]
    assert full.out_slots.tolist() == [16, 48, 80, -1, -1]
    assert full.seq_lens.tolist() == [17, 18, 19, 0, 0]
    assert full.page_table.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]
    assert full.page_table.dtype == np.int32
    assert full.num_sampled.tolist() == [1] * 5
    assert pad(batch, 3).out_slots.tolist() == batch.out_slots.tolist()
