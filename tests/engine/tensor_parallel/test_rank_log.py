from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows
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
    )


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("prompt_rows", [None, PromptRows(np.array([0, 1]), np.array([0, 1]), 0)])
def test_a_step_arrives_as_it_was_sent(mode: ForwardMode, prompt_rows: PromptRows | None) -> None:
    sent = batch(mode, prompt_rows)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    np.testing.assert_equal(
        dataclasses.asdict(step_from_wire(rank_pb2.RankEntry.FromString(wire).step)), dataclasses.asdict(sent)
    )
