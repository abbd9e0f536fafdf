"""How much of a GPU becomes KV pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import DraftLayers
from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.common.errors import ConfigError
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import DeviceMemory, StepSpeed
from diptych.engine.runner.gpu.memory import (
    GIB,
    GRAPH_NBYTES,
    MOST_BUFFERED,
    PIECE_NBYTES,
    SPARE_NBYTES,
    KvMemory,
    all_graphs_nbytes,
    beside,
    buffer_pages,
    check_room_beside,
    found_on,
    graphs_nbytes,
    pool_nbytes,
)
from diptych.engine.schedule.pace.step_sizes import Found
from diptych.kvtransfer.layout import PoolLayout

ALONE = DeviceMemory(total=100 * GIB, free=84 * GIB, own=15 * GIB, step_peak=3 * GIB)


def test_the_pool_takes_what_weights_steps_and_graphs_leave_of_the_share() -> None:
    assert pool_nbytes(ALONE, 0.75, 0) == (75 - 15 - 3) * GIB
    assert pool_nbytes(ALONE, 0.75, 2 * GIB) == (75 - 15 - 3 - 2) * GIB
    assert pool_nbytes(ALONE, 0.75, 2 * GIB, GIB) == (75 - 15 - 3 - 2 - 1) * GIB


def test_what_images_take_is_neither_for_steps_nor_for_the_pool() -> None:
    assert pool_nbytes(beside(ALONE, 2 * GIB), 0.75, 0) == (75 - 15 - 3 - 2) * GIB
    assert pool_nbytes(beside(ALONE, 80 * GIB), 1.0, 0) == 1 * GIB, "no more than is free"


def test_what_leaves_for_host_memory_takes_what_the_largest_step_writes_but_no_more_than_there_is_to_keep() -> None:
    layout = PoolLayout.kv(1, num_layers=4, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    page = layout.page_nbytes
    assert buffer_pages(0, 48, layout) == 0
    assert buffer_pages(3 * page - 1, 48, layout) == 2  # whole pages
    assert buffer_pages(9 * page, 33, layout) == 3
    assert buffer_pages(9 * GIB, GIB, layout) == MOST_BUFFERED // page


def test_graphs_share_tensors_of_as_many_rows_as_requests_and_pieces_those_of_their_most_tokens() -> None:
    limits = StepLimits(max_step_tokens=6144, max_requests=64, max_pages=8)
    own = 8 * GRAPH_NBYTES + 10 * 33 * PIECE_NBYTES
    assert graphs_nbytes(limits, 32, 3 * GIB) == own + GIB // 32 + GIB // 4
    assert graphs_nbytes(limits, 32, 3 * GIB, kinds=2) == 2 * own + GIB // 32 + GIB // 4, "with adapters and without"
    assert graphs_nbytes(limits, 32, 3 * GIB, kinds=0) == 0
    few = replace(limits, max_step_tokens=8)
    assert graphs_nbytes(few, 1, 3 * GIB) == 8 * GRAPH_NBYTES + 2 * PIECE_NBYTES + 6 * GIB


def test_a_draft_model_records_graphs_of_its_own_without_adapters() -> None:
    limits = StepLimits(max_step_tokens=6144, max_requests=64, max_pages=8)
    alone, draft = tiny_config(num_layers=32), tiny_config(num_layers=4)
    both = replace(alone, draft=DraftLayers(draft, 2))
    of_draft = 8 * GRAPH_NBYTES + 10 * 5 * PIECE_NBYTES + GIB // 32 + GIB // 4
    for kinds in (1, 2):
        own = graphs_nbytes(limits, 32, 3 * GIB, kinds)
        assert all_graphs_nbytes(alone, limits, 3 * GIB, kinds) == own
        assert all_graphs_nbytes(both, limits, 3 * GIB, kinds) == own + of_draft
    assert all_graphs_nbytes(both, limits, 3 * GIB, 0) == 0


def test_recurrent_layers_have_graphs_of_what_came_true_of_drafts() -> None:
    limits = StepLimits(max_step_tokens=6144, max_requests=32, max_pages=8, max_drafts=32)
    plain = tiny_config(num_layers=32)
    recurrent = replace(plain, recurrent=Recurrent((0,), ShortConv(64, 3)))
    own = all_graphs_nbytes(plain, limits, 3 * GIB, 1)
    assert all_graphs_nbytes(recurrent, limits, 3 * GIB, 1) == own + 8 * GRAPH_NBYTES
    assert all_graphs_nbytes(recurrent, limits, 3 * GIB, 0) == 0
    undrafted = replace(limits, max_requests=64, max_drafts=0)
    assert all_graphs_nbytes(recurrent, undrafted, 3 * GIB, 1) == own


def test_a_step_may_take_an_eighth_of_what_weights_leave_and_kv_gets_the_rest() -> None:
    memory, speed = replace(ALONE, step_peak=GIB // 2), StepSpeed(40_000, 0.008)
    found = found_on(memory, 0.95, 512, speed, KvMemory(token_nbytes=1 << 17, nbytes=0))
    assert found == Found(40_000, 0.008, step_tokens_in_memory=512 * 20.0, kv_tokens=70 * GIB >> 17)
    given = found_on(memory, 0.95, 512, speed, KvMemory(token_nbytes=1 << 17, nbytes=GIB))
    assert given == replace(found, kv_tokens=GIB >> 17, step_tokens_in_memory=512 * 79.0)
    large = found_on(memory, 0.95, 512, speed, KvMemory(token_nbytes=1 << 17, nbytes=79 * GIB))
    assert large.step_tokens_in_memory == 512, "a pool of a given size leaves steps what is left"
    assert found_on(replace(memory, own=99 * GIB), 0.95, 512, speed, KvMemory(1 << 17, 0)).kv_tokens == 0


def test_what_others_have_taken_is_not_there() -> None:
    """The second of two workers that may take half each has as much as the first, but not more than is free."""
    second = replace(ALONE, free=34 * GIB)
    assert pool_nbytes(second, 0.5, 0) == pool_nbytes(ALONE, 0.5, 0) - GIB == 31 * GIB


def test_a_model_that_leaves_nothing_is_refused_in_numbers() -> None:
    memory = DeviceMemory(total=80 * GIB, free=9 * GIB, own=70 * GIB, step_peak=2 * GIB)
    with pytest.raises(ConfigError, match=r"9\.0 of 80\.0 GiB are free, the weights have 70\.0 of the 88%"):
        pool_nbytes(memory, 0.88, 0)


def test_other_weights_are_refused_where_a_step_would_not_find_its_memory_beside_them() -> None:
    check_room_beside(15 * GIB, 2 * GIB, free=17 * GIB)
    with pytest.raises(ConfigError, match=r"take 17\.0 GiB of GPU memory, 16\.5 are free"):
        check_room_beside(15 * GIB, 2 * GIB, free=33 * GIB // 2)
    with pytest.raises(ConfigError, match="lower --gpu-memory-share"):
        check_room_beside(15 * GIB, 0, free=15 * GIB + SPARE_NBYTES - 1)
