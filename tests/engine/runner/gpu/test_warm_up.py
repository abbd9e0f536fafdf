"""Steps that are run ahead: of all sizes, and nobody's pages."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_config import tiny_config

from diptych.common.arrays import I64
from diptych.engine.attention.hopper_prompts import HopperPrompts
from diptych.engine.attention.layer_constants import rope_tables
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import largest_step, longest_extend, longest_timed, timed_steps
from diptych.engine.runner.gpu.warm_up import up_to, warm_up_steps
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.kernels.gpu.attention.extend_attention import choose_tile
from diptych.kernels.gpu.attention.split_extend_attention import is_short, split_tile


def test_sizes_are_the_powers_of_two_half_as_many_again_and_the_limit() -> None:
    assert [up_to(limit) for limit in (1, 2, 5, 16)] == [(1,), (1, 2), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 8, 12, 16)]


def test_steps_have_all_sizes_and_write_to_the_null_page_alone() -> None:
    steps = list(warm_up_steps(StepLimits(max_step_tokens=40, max_requests=5, max_pages=8), page_size=4, longest=16))
    prompts = [step.extend_lens.tolist() for step in steps if step.mode is ForwardMode.EXTEND]
    assert prompts == [[1], [2], [3], [4], [6], [8], [12], [16], [16, 8], [16, 16], [16, 16, 8], [2]]
    assert [step.batch_size for step in steps if step.mode is ForwardMode.DECODE] == [1, 2, 3, 4, 5]
    for step in steps:
        assert len(step.input_ids) == step.extend_lens.sum() == len(step.positions)
        assert step.out_slots.max() < 4
        assert not step.page_table.any()
        assert step.page_table.shape == (step.batch_size, -(-step.seq_lens.max() // 4))


def test_a_few_tokens_come_behind_a_prefix_of_the_null_page_too() -> None:
    steps = warm_up_steps(StepLimits(max_step_tokens=512, max_requests=2, max_pages=1000), page_size=16, longest=4096)
    behind = [step for step in steps if (step.seq_lens != step.extend_lens).any()]
    assert [(step.extend_lens.tolist(), step.seq_lens.tolist()) for step in behind] == [([2], [2050]), ([32], [2080])]
    assert [step.positions[0] for step in behind] == [2048, 2048]
    assert max(step.out_slots.max() for step in behind) < 16


@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 4), (8, 8), (4, 8), (16, 2), (32, 1), (8, 5)])
def test_no_prompts_attend_by_a_kernel_that_no_step_has_had_before(num_kv_heads: int, group: int) -> None:
    """A kernel that is compiled while requests wait stops all of them for a second or two."""
    heads = SimpleNamespace(num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group, head_dim=128)
    limits = StepLimits(max_step_tokens=8192, max_requests=256, max_pages=512)
    before = {attends_by(step.extend_lens, heads) for step in warm_up_steps(limits, 16, 8192) if is_extend(step)}
    rng = np.random.default_rng(group)
    for _ in range(4000):
        longest = int(2 ** rng.uniform(0, 13))
        lens = rng.integers(1, longest + 1, size=int(2 ** rng.uniform(0, 8)))
        lens = lens[: max(1, int((lens.cumsum() <= limits.max_step_tokens).sum()))]
        assert attends_by(lens, heads) in before, lens


@pytest.mark.parametrize(("num_kv_heads", "group"), [(4, 2), (8, 2), (16, 2)])  # Gemma 3's
def test_steps_as_those_with_images_are_run_with_every_tile(num_kv_heads: int, group: int) -> None:
    limits = StepLimits(max_step_tokens=8192, max_requests=256, max_pages=512, looks_ahead=True)
    ahead = [step.extend_lens for step in warm_up_steps(limits, 16, 8192) if step.looks_ahead]
    rows = [(int(lens.sum()) * group, int(lens.max()) * group) for lens in ahead]
    assert {choose_tile(*each, num_kv_heads, 256, torch.bfloat16).rows for each in rows} == {16, 64, 128}


def is_extend(step: ForwardBatch) -> bool:
    return step.mode is ForwardMode.EXTEND


def attends_by(lens: I64, heads: Any) -> tuple[str, int]:
    """Return the kernel by which prompts attend on Hopper, bfloat16, and the rows of its tiles."""
    group = heads.num_heads // heads.num_kv_heads
    rows = int(lens.sum()) * group, int(lens.max()) * group
    if HopperPrompts._pays(SimpleNamespace(_config=heads), lens):  # type: ignore[arg-type]
        return "hopper", 0
    if is_short(*rows, heads.num_kv_heads, heads.head_dim):
        return "shared out", split_tile(rows[1], heads.head_dim, torch.bfloat16).rows
    return "extend", choose_tile(*rows, heads.num_kv_heads, heads.head_dim, torch.bfloat16).rows


@pytest.mark.parametrize("pool_pages", [32, 4096])
@pytest.mark.parametrize("context_len", [1000, 2050, 3000, 4095])
def test_no_step_before_the_first_request_is_longer_than_what_is_known_of_positions(
    context_len: int, pool_pages: int
) -> None:
    """Whatever is left of a context's last page, and in a pool that is smaller than a context."""
    limits = StepLimits(max_step_tokens=8192, max_requests=1, max_pages=-(-context_len // 16))
    config = tiny_config(context_len=context_len)

    def num_positions(num_pages: int) -> int:
        return min(map(len, rope_tables(config, torch.empty(num_pages, 1, 1, 16, 1, 0)).values()))

    for longest, steps in (
        (longest_extend(limits, 16), [largest_step(limits, 16)[0]]),
        (longest_timed(limits, 16), timed_steps(limits, 16)),
    ):
        assert max(step.seq_lens.max() for step in steps) <= num_positions(-(-longest // 16))
    longest = min(context_len, pool_pages * 16)
    steps = list(warm_up_steps(limits, 16, longest))
    assert context_len <= num_positions(4096)
    assert max(step.seq_lens.max() for step in steps) <= num_positions(pool_pages)


def test_steps_of_a_model_with_groups_of_layers_name_the_null_page_for_each() -> None:
    limits = StepLimits(max_step_tokens=8, max_requests=5, max_pages=8, num_window_groups=2)
    for step in warm_up_steps(limits, page_size=4, longest=16):
        assert step.window_groups is not None
        assert step.window_groups.page_tables.shape == (2, *step.page_table.shape)
        assert not step.window_groups.page_tables.any()
        assert step.window_groups.out_slots.tolist() == [step.out_slots.tolist()] * 2


def test_prompts_that_many_requests_would_have_to_share_are_as_many_as_may_run() -> None:
    steps = list(warm_up_steps(StepLimits(max_step_tokens=64, max_requests=2, max_pages=8), page_size=4, longest=8))
    assert max(step.batch_size for step in steps) == 2


def test_a_kernel_that_is_compiled_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from diptych.engine.runner.gpu.warm_up import log_compilation

    log_compilation(
        src=None, metadata={"name": "grouped_gemm"}, times=SimpleNamespace(total=1_500_000), cache_hit=False
    )
    assert caplog.messages == ["kernel grouped_gemm was compiled in 1.50 s, while serving"]
    assert caplog.records[0].levelno == logging.WARNING
