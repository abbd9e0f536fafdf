from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, StateMoves, WindowGroups
from diptych.v1 import rank_pb2

NOTHING = np.zeros(0, np.int64)


def batch(mode: ForwardMode, prompt_rows: PromptRows | None) -> ForwardBatch:
    return ForwardBatch(
        mode=mode,
        input_ids=np.array([5, 6, 7]),
        positions=np.array([0, 1, 9]),
        out_slots=np.array([64, 65, 2**40]),
        page_table=np.array([[4, 0], [3, 2]], np.int32),
        seq_lens=np.array([2, 10]),
        extend_lens=np.array([2, 1]),
        num_sampled=np.array([2, 0]),
        prompt_rows=prompt_rows,
        adapters=None if prompt_rows is None else np.array([3, -1]),
    )


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("prompt_rows", [None, PromptRows(np.array([0, 1]), np.array([0, 1]), 0)])
def test_a_step_arrives_as_it_was_sent(mode: ForwardMode, prompt_rows: PromptRows | None) -> None:
    sent = batch(mode, prompt_rows)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    np.testing.assert_equal(
        dataclasses.asdict(step_from_wire(rank_pb2.RankEntry.FromString(wire).step)), dataclasses.asdict(sent)
    )


def test_where_layers_with_a_window_have_their_pages_arrives_as_it_was_sent() -> None:
    windows = WindowGroups(
        np.arange(12, dtype=np.int32).reshape(3, 2, 2), np.array([[0, 1, 2], [3, 4, 5], [6, 7, 2**40]])
    )
    sent = dataclasses.replace(batch(ForwardMode.MIXED, None), window_groups=windows)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    found = step_from_wire(rank_pb2.RankEntry.FromString(wire).step)
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(sent))
    assert found.window_groups is not None
    assert found.window_groups.page_tables.flags.writeable, "torch takes no other"


@pytest.mark.parametrize("num_copies", [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_what_is_copied_of_states_arrives_as_it_was_sent(num_copies: tuple[int, int]) -> None:
    """It has as many pages a state as it had, even where there is nothing to copy."""
    num_read, num_written = num_copies
    moves = StateMoves(
        slots=np.array([3, 0]),
        cleared=np.array([0]),
        read_slots=np.arange(num_read),
        read_pages=np.arange(3 * num_read, dtype=np.int32).reshape(num_read, 3),
        written_slots=np.arange(num_written) + 1,
        written_pages=np.arange(3 * num_written, dtype=np.int32).reshape(num_written, 3) + 50,
    )
    sent = dataclasses.replace(batch(ForwardMode.MIXED, None), states=moves)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    found = step_from_wire(rank_pb2.RankEntry.FromString(wire).step).states
    assert found is not None
    assert (found.read_pages.shape, found.written_pages.shape) == ((num_read, 3), (num_written, 3))
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(moves))
