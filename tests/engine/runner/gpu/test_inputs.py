"""What a step finds on the device, and what it is told of it on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from diptych.engine.runner.gpu.inputs import StepInputs, StepLimits
from diptych.engine.runner.gpu.measuring import largest_step
from diptych.engine.runner.gpu.staging import Staging
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, WindowGroups

LIMITS = StepLimits(max_step_tokens=16, max_requests=8, max_pages=4)


class Mark:
    """An event that is over at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def test_a_step_that_is_filled_up_has_more_tokens_at_one_address_and_nothing_else_of_them() -> None:
    cpu = torch.device("cpu")
    inputs = StepInputs(LIMITS, Staging(LIMITS.nbytes, cpu, Mark), cpu)
    addresses = set()
    for size in (3, 5, 8):
        staged = inputs.stage_filled_up(batch_of(size), 8)
        addresses.add(staged.input_ids.data_ptr())
        assert staged.input_ids.tolist() == [*range(size), *[0] * (8 - size)]
        assert staged.positions.tolist() == list(range(size))
        assert len(staged.out_slots) == len(staged.seq_lens) == staged.host.batch_size == size
    assert len(addresses) == 1


def test_a_replayed_step_has_its_adapters_at_one_address_whoever_is_in_it() -> None:
    cpu, limits = torch.device("cpu"), replace(LIMITS, max_loras=3)
    inputs = StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu)
    for stage in (inputs.stage_filled_up, inputs.stage_padded):
        addresses = set()
        for size in (3, 5, 8):
            staged = stage(replace(batch_of(size), adapters=np.arange(size) % 4 - 1), 8)
            assert staged.adapters is not None
            assert len(staged.adapters.tokens) == 8
            assert staged.adapters.tiles[:, 2].sum() == sum(row % 4 > 0 for row in range(size))
            arrays = (staged.input_ids, staged.adapters.tokens, staged.adapters.tiles)
            addresses.add(tuple(array.data_ptr() for array in arrays))
            assert stage(batch_of(size), 8).adapters is None
        assert len(addresses) == 1


def test_what_follows_the_last_attention_has_as_many_rows_as_a_graph_of_decode_steps() -> None:
    """The first token stands for those that a step lacks, without an adapter. Rows of prompts are as many as wanted."""
    cpu, limits = torch.device("cpu"), replace(LIMITS, max_loras=3)
    inputs = StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu)
    for size, rung in ((1, 1), (3, 4), (4, 4), (5, 8)):
        batch = replace(batch_of(size), adapters=np.ones(size, np.int64))
        for stage in (inputs.stage, lambda batch: inputs.stage_filled_up(batch, 16)):
            staged = stage(batch)
            assert staged.logits_rows.tolist() == [*range(size), *[0] * (rung - size)]
            assert staged.late_adapters is not None
            assert len(staged.late_adapters.tokens) == rung
            assert staged.late_adapters.tiles[:, 2].sum() == size
    prompt_rows = PromptRows(np.arange(2), np.zeros(2, np.int64), 1)
    assert len(inputs.stage(replace(batch_of(3), prompt_rows=prompt_rows)).logits_rows) == 5
    nothing = replace(batch_of(3), mode=ForwardMode.EXTEND, num_sampled=np.zeros(3, np.int64))
    assert len(inputs.stage(nothing).logits_rows) == 0


def test_the_largest_step_with_adapters_fits() -> None:
    limits, cpu = replace(LIMITS, max_loras=8), torch.device("cpu")
    batch, _ = largest_step(limits, page_size=4)
    StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu).stage(
        replace(batch, adapters=np.arange(batch.batch_size))
    )


def test_a_padded_step_has_as_many_rows_on_the_host_as_on_the_device() -> None:
    """A backend that plans on the host plans for the graph's rows, not for the batch's."""
    cpu = torch.device("cpu")
    staged = StepInputs(LIMITS, Staging(LIMITS.nbytes, cpu, Mark), cpu).stage_padded(batch_of(3), 8)
    assert staged.host.seq_lens.tolist() == staged.seq_lens.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert len(staged.host.page_table) == len(staged.page_table) == 8


def test_a_step_has_room_for_the_drafts_of_all_requests() -> None:
    cpu, limits = torch.device("cpu"), replace(LIMITS, max_drafts=16)
    assert (LIMITS.max_samples, limits.max_samples) == (8, 24)
    inputs = StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu)
    assert len(inputs.stage_padded(batch_of(20), 24).page_table) == 24


def test_pages_of_layers_with_a_window_lie_at_one_address_of_each_group_in_all_replays() -> None:
    cpu, limits = torch.device("cpu"), replace(LIMITS, num_window_groups=2)
    assert limits.nbytes - LIMITS.nbytes == 2 * (8 * (16 + 8) + 4 * 4 * (8 + 1))
    inputs, addresses = StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu), set()
    for size in (3, 5, 8):
        host = windowed(batch_of(size))
        staged = inputs.stage_padded(host, 8)
        groups = [staged.of_group(group) for group in range(3)]
        addresses.add(tuple((each.page_table.data_ptr(), each.out_slots.data_ptr()) for each in groups))
        for group, each in enumerate(groups):
            own = host.of_group(group)
            assert each.page_table.shape == (8, 4)
            assert each.page_table[:size, :1].tolist() == own.page_table.tolist()
            assert each.out_slots.tolist() == [*own.out_slots.tolist(), *[-1] * (8 - size)]
            assert each.host.page_table.tolist() == [*own.page_table.tolist(), *[[0]] * (8 - size)]
    assert len(addresses) == 1


def windowed(batch: ForwardBatch) -> ForwardBatch:
    """Give it two groups of layers with a window, on other pages."""
    tables = np.stack([batch.page_table + 100, batch.page_table + 200])
    return replace(
        batch, window_groups=WindowGroups(tables, np.stack([batch.out_slots + 1600, batch.out_slots + 3200]))
    )


def test_the_largest_step_of_a_model_with_groups_fits() -> None:
    cpu, limits = torch.device("cpu"), replace(LIMITS, num_window_groups=3)
    batch, _ = largest_step(limits, page_size=2)
    staged = StepInputs(limits, Staging(limits.nbytes, cpu, Mark), cpu).stage(batch)
    assert staged.window_tables is not None
    assert staged.window_tables.shape == (3, *batch.page_table.shape)


def batch_of(size: int) -> ForwardBatch:
    rows = np.arange(size)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=rows,
        positions=rows,
        out_slots=rows * 16,
        page_table=rows[:, None].astype(np.int32),
        seq_lens=rows + 1,
        extend_lens=np.ones(size, np.int64),
        num_sampled=np.ones(size, np.int64),
    )
