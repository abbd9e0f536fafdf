"""Halves of a step: where it is cut, that nothing is lost, and which steps are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.schedule.micro_batches import halves, late_tokens
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, WindowGroups


def batch_of(extend_lens: list[int]) -> ForwardBatch:
    """Return a step in which all numbers differ."""
    size, total = len(extend_lens), sum(extend_lens)
    numbers = np.arange(total)
    tables = np.arange(size * 3, dtype=np.int32).reshape(size, 3)
    return ForwardBatch(
        mode=ForwardMode.MIXED,
        input_ids=numbers + 1,
        positions=numbers + 2,
        out_slots=numbers + 3,
        page_table=tables,
        seq_lens=np.array(extend_lens) + 5,
        extend_lens=np.array(extend_lens),
        num_sampled=np.arange(size) % 2,
        adapters=np.arange(size),
        window_groups=WindowGroups(np.stack([tables + 1, tables + 2]), np.stack([numbers + 4, numbers + 6])),
        rows_before=numbers + 7,
        rope_positions=np.stack([numbers, numbers + 1, numbers + 2]),
    )


def arrays(*parts: ForwardBatch) -> dict[str, Any]:
    """Return all arrays of the parts of a step, one's behind the other's."""
    found: dict[str, Any] = {"tables": [], "slots": []}
    for part in parts:
        for name in ForwardBatch.__dataclass_fields__:
            value = getattr(part, name)
            if isinstance(value, WindowGroups):
                found["tables"].append(value.page_tables.swapaxes(0, 1))
                found["slots"].append(value.out_slots.T)
            elif isinstance(value, np.ndarray):
                found.setdefault(name, []).append(value.T if name == "rope_positions" else value)
    return {name: np.concatenate(each) for name, each in found.items()}


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12))
def test_two_halves_are_the_step_and_no_other_cut_is_better(extend_lens: list[int]) -> None:
    batch, total = batch_of(extend_lens), sum(extend_lens)
    late = late_tokens(batch, total)
    first, second = halves(batch, late)
    assert first.batch_size > 0 < second.batch_size
    assert (len(first.input_ids), len(second.input_ids)) == (total - late, late)
    whole = arrays(batch)
    for name, found in arrays(first, second).items():
        np.testing.assert_array_equal(found, whole[name], err_msg=name)
    others = (max(sum(extend_lens[:cut]), sum(extend_lens[cut:])) for cut in range(1, len(extend_lens)))
    assert max(total - late, late) == min(others)
    assert first.mode is second.mode is ForwardMode.MIXED


@pytest.mark.parametrize(
    ("extend_lens", "least_tokens", "late"),
    [([1] * 8, 8, 4), ([1] * 8, 9, 0), ([1] * 8, 0, 0), ([90], 2, 0), ([1, 1, 30], 4, 30), ([30, 1, 1], 4, 2)],
)
def test_a_step_is_cut_at_the_end_of_a_request_if_it_is_large(
    extend_lens: list[int], least_tokens: int, late: int
) -> None:
    assert late_tokens(batch_of(extend_lens), least_tokens) == late


@pytest.mark.parametrize(
    "counted",
    [
        {"prompt_rows": PromptRows(np.arange(1), np.arange(1), 0)},
        {"row_lens": np.ones(4, np.int64)},
        {"looks_ahead": True},
        *({name: object()} for name in ("states", "embeds", "insight")),
        *({name: (object(),)} for name in ("images", "encodes")),
    ],
    ids=lambda counted: next(iter(counted)),
)
def test_a_step_is_not_cut_in_which_something_is_told_by_its_place(counted: dict[str, Any]) -> None:
    assert late_tokens(replace(batch_of([4] * 4), **counted), 2) == 0


def test_a_cut_within_a_request_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="a request is in one half"):
        halves(batch_of([4, 4]), 3)
