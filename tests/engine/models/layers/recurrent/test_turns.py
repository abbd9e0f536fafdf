"""Who takes a turn with which state in a step: with a rule that counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.turns import take_turns, turns
from diptych.kernels.slot_rows import SlotRows

NUM_SLOTS = 4


class RunningSum:
    """Adds up a request's tokens: results are what is there behind each."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # how many requests each had

    def step(self, projected: Tensor, state: tuple[Tensor, ...], rows: SlotRows, out: Tensor) -> None:
        self.steps.append(len(rows.slots))
        state[0][rows.slots] += projected
        out.copy_(state[0][rows.slots])

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        for tokens, own in turns(state[0], batch):
            out[tokens] = own + projected[tokens].cumsum(0)
            own.copy_(out[tokens][-1])


@dataclasses.dataclass
class Host:
    """What is read of a `ForwardBatch`."""

    extend_lens: Any

    @property
    def batch_size(self) -> int:
        return len(self.extend_lens)


def mixed(lens: list[int], slots: list[int]) -> Any:
    """Return results, the states behind them, and the steps; token i is 10 ** i, slot s begins with s / 10."""
    host: Any = Host(np.array(lens, np.int64))
    nothing = torch.empty(0)
    others: dict[str, Any] = {
        name: nothing for name in ("input_ids", "positions", "out_slots", "page_table", "seq_lens")
    }
    others |= {"extend_starts": nothing, "logits_rows": nothing, "state_slots": torch.tensor(slots)}
    batch = StagedBatch(host=host, **others)
    projected = 10.0 ** torch.arange(sum(lens), dtype=torch.float64)[:, None]
    state, out, rule = (
        torch.arange(NUM_SLOTS, dtype=torch.float64)[:, None] / 10,
        torch.empty_like(projected),
        RunningSum(),
    )
    take_turns(rule, projected, (state,), batch, out)
    return out.flatten().tolist(), state.flatten().tolist(), rule.steps


def test_single_tokens_are_one_step() -> None:
    assert mixed([1, 1, 1], [3, 0, 1]) == (pytest.approx([1.3, 10, 100.1]), pytest.approx([10, 100.1, 0.2, 1.3]), [3])


def test_single_tokens_among_prompts_are_one_step_and_prompts_go_on_from_their_own_states() -> None:
    out, state, steps = mixed([2, 1, 3, 1], [1, 3, 2, 0])
    assert out == pytest.approx([1.1, 11.1, 100.3, 1000.2, 11000.2, 111000.2, 1e6])
    assert state == pytest.approx([1e6, 11.1, 111000.2, 100.3])
    assert steps == [2]


def test_prompts_alone_are_no_step() -> None:
    assert mixed([2, 2], [0, 1])[1:] == (pytest.approx([11, 1100.1, 0.2, 0.3]), [])


def test_a_prompt_of_nobodys_leaves_every_state_as_it_is() -> None:
    assert mixed([2, 2], [-1, 1])[1:] == (pytest.approx([0, 1100.1, 0.2, 0.3]), [])
