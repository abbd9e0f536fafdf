"""Runs of states between workers of any pages, types and ranks: every byte arrives where it belongs, once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_landing import land

from diptych.common.errors import ConfigError
from diptych.kernels.page_pack import pack_page
from diptych.kvtransfer.errors import LayoutMismatch, TransferError
from diptych.kvtransfer.layout import (
    LINE_NBYTES,
    HeadShare,
    PoolLayout,
    StateStage,
    layout_from_wire,
    layout_to_wire,
)
from diptych.kvtransfer.plan import MESSAGE_NBYTES, linked_ranks, plan
from diptych.kvtransfer.state_plan import state_runs
from diptych.kvtransfer.transport import PageWrite

Array = np.ndarray[Any, Any]
NUM_PAGES = 60
NUM_LAYERS = 5  # that keep a state


def side(num_ranks: int, page_size: int, units: int, unit_nbytes: int, dtype: str = "float32") -> list[PoolLayout]:
    """The layouts of a worker's ranks."""
    shares = [HeadShare(rank, num_ranks, 24) for rank in range(num_ranks)]
    pages = [PoolLayout.kv(NUM_PAGES, 2, page_size, 24 // num_ranks, 16, dtype, share) for share in shares]
    return [replace(each, state_nbytes=units * unit_nbytes) for each in pages]


def staged(
    num_ranks: int, cuts: Sequence[int], page_size: int, units: int, lines: int, dtype: str = "float32"
) -> list[PoolLayout]:
    """Those of all ranks, stage by stage; `cuts`: the first layers with a state of the stages behind the first.

    Stages have unlike pages. Without cuts there is one, which says nothing of stages.
    """
    nbytes, shares = (
        units * NUM_LAYERS * lines * LINE_NBYTES,
        [HeadShare(rank, num_ranks, 24) for rank in range(num_ranks)],
    )
    every, layouts = tuple(range(8)), []
    stages = list(itertools.pairwise((0, *cuts, NUM_LAYERS)))
    kept = [every[2 * i : 2 * i + 1 + i % 2] for i in range(len(stages))]  # one layer that attends, or two
    for (first, end), layers in zip(stages, kept, strict=True):
        for share in shares:
            plain = PoolLayout.kv(NUM_PAGES, 8, page_size, 24 // num_ranks, 16, dtype, share)
            region = replace(plain.sole_region, layers=layers if cuts else every, total_layers=every if cuts else ())
            stage = StateStage(units, first, end - first, NUM_LAYERS, 1) if cuts else None
            layouts.append(replace(plain, regions=(region,), state_nbytes=nbytes, state_stage=stage))
    most = max(-(-each.share_nbytes // each.page_nbytes) for each in layouts)
    made = [each.state_stage and replace(each.state_stage, num_pages=most) for each in layouts]
    found = [replace(each, state_stage=stage) for each, stage in zip(layouts, made, strict=True)]
    for each in found:
        each.validate()
        assert layout_from_wire(layout_to_wire(each)) == each
    return found


def cells_of(layout: PoolLayout, state: Array) -> Array:
    """What a rank has of a state `[units, layers, cell_nbytes]`, one cell behind the other."""
    stage, share = layout.state_stage, len(state) // layout.num_ranks
    layers = slice(None) if stage is None else slice(stage.first_layer, stage.first_layer + stage.num_layers)
    return state[layout.rank * share : (layout.rank + 1) * share, layers].ravel()


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 2),
    cuts=st.tuples(*[st.sets(st.integers(1, 4), max_size=3).map(sorted)] * 2),
    sizes=st.tuples(*[st.sampled_from([2, 3, 8])] * 2),
    lines=st.integers(1, 9),
)
def test_every_cell_of_a_state_arrives_in_whatever_stage_and_rank_it_belongs_to(
    ranks: tuple[int, int], cuts: tuple[list[int], list[int]], sizes: tuple[int, int], lines: int
) -> None:
    src, dst = (staged(*each, 12, lines) for each in zip(ranks, cuts, sizes, strict=True))
    state = np.random.default_rng(9).integers(0, 256, (12, NUM_LAYERS, lines * LINE_NBYTES), np.uint8)
    wanted, to = np.arange(src[0].pages_per_state)[::-1] + 3, np.arange(dst[0].pages_per_state) + 5
    pools = [
        np.random.default_rng(i).integers(0, 256, (NUM_PAGES, each.page_nbytes), np.uint8) for i, each in enumerate(src)
    ]
    for layout, pool in zip(src, pools, strict=True):
        held = pool[wanted].ravel()
        held[: layout.share_nbytes] = cells_of(layout, state)
        pool[wanted] = held.reshape(len(wanted), -1)
    for layout in dst:
        target = np.full((NUM_PAGES, layout.page_nbytes), 0xEE, np.uint8)
        times = np.zeros(target.shape, np.int64)
        for one, pool in zip(src, pools, strict=True):
            copies = plan(one, layout)
            for runs in copies.cut(PageWrite(wanted, to, as_bytes=True)) if copies else ():
                land(pool, target, runs)
                times[runs.dst, runs.window.dst : runs.window.dst + runs.window.nbytes] += 1
        assert target[to].ravel()[: layout.share_nbytes].tobytes() == cells_of(layout, state).tobytes()
        assert (times[to] == 1).all()
        assert times.sum() == len(to) * layout.page_nbytes


def test_equal_stages_send_whole_pages_and_others_a_run_of_each_unit() -> None:
    three, two, (whole,) = staged(1, (2, 3), 2, 4, 8), staged(1, (2,), 2, 4, 8), staged(1, (), 2, 4, 8)
    for stage in three:
        copies = plan(stage, stage)
        assert copies is not None
        assert [(run.copy.pack, run.copy.nbytes) for run in copies.state] == [(None, stage.page_nbytes)]
    assert linked_ranks(whole, three) == (0, 1, 2)
    assert [len(state_runs(three[0], each)) > 0 for each in two] == [True, False]
    begins = sorted({run.pages.start * whole.page_nbytes + run.copy.dst for run in state_runs(three[1], whole)})
    unit, cell = NUM_LAYERS * 8 * LINE_NBYTES, 8 * LINE_NBYTES
    assert {unit_start + 2 * cell for unit_start in range(0, 4 * unit, unit)} <= set(begins)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first_layer": 3}, "a stage can't have such a part of a state on 1 ranks"),
        ({"num_layers": 0}, "a stage can't have such a part"),
        ({"num_units": 0}, "a stage can't have such a part"),
        ({"num_units": 7}, "has no 35 cells in whole lines"),
        ({"num_layers": 3, "first_layer": 0, "num_pages": 1}, "1 pages hold no part of a state of"),
    ],
)
def test_what_no_stage_can_have_of_a_state_is_refused(changes: dict[str, int], words: str) -> None:
    """It comes from peers."""
    layout = staged(1, (2,), 2, 4, 64)[1]
    assert layout.state_stage is not None
    with pytest.raises(ConfigError, match=words):
        replace(layout, state_stage=replace(layout.state_stage, **changes)).validate()


def test_stages_of_another_model_are_refused() -> None:
    stage = staged(1, (2,), 2, 4, 6)[0]
    assert stage.state_stage is not None
    other = replace(stage, state_stage=replace(stage.state_stage, num_units=2))
    with pytest.raises(LayoutMismatch, match="states of another model: StateStage"):
        plan(stage, other)
    with pytest.raises(LayoutMismatch, match="1 and 3 ranks can't share 4 parts of states"):
        plan(stage, replace(side(3, 4, 6, 2560)[0], regions=staged(3, (), 2, 12, 6)[0].regions))


def pages_of(layout: PoolLayout, seed: int) -> Array:
    count = -(-layout.share_nbytes // layout.page_nbytes)
    return np.random.default_rng(seed).permutation(NUM_PAGES)[:count]


def send(src: list[PoolLayout], dst: list[PoolLayout], state: Array) -> tuple[list[Array], list[Array]]:
    """Return the pages of each target rank, and how often each byte of them was written."""
    targets = [np.full((NUM_PAGES, each.page_nbytes), 0xEE, np.uint8) for each in dst]
    times = [np.zeros(each.shape, np.int64) for each in targets]
    wanted, to = pages_of(src[0], 1), pages_of(dst[0], 2)
    for one in src:
        pool = np.random.default_rng(one.rank).integers(0, 256, (NUM_PAGES, one.page_nbytes), np.uint8)
        held = pool[wanted].ravel()
        held[: one.share_nbytes] = state[one.rank * one.share_nbytes :][: one.share_nbytes]
        pool[wanted] = held.reshape(len(wanted), -1)
        for other in dst:
            copies = plan(one, other)
            for runs in copies.cut(PageWrite(wanted, to, as_bytes=True)) if copies else ():
                window = runs.window
                for source, target in zip(
                    (runs.src if runs.pack is None else runs.first_tokens).tolist(), runs.dst.tolist(), strict=True
                ):
                    image = pool[source] if runs.pack is None else pack_page(runs.pack, pool, runs.src, source)
                    here = target, slice(window.dst, window.dst + window.nbytes)
                    targets[other.rank][here] = image[window.src : window.src + window.nbytes]
                    times[other.rank][here] += 1
    return [each[to] for each in targets], [each[to] for each in times]


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 12])] * 2),
    pages=st.tuples(*[st.sampled_from([1, 2, 3, 5, 8])] * 2),
    dtypes=st.tuples(*[st.sampled_from(["float32", "bfloat16"])] * 2),
    lines=st.integers(1, 12),
)
def test_every_byte_of_a_state_arrives_where_it_belongs_and_all_that_is_granted_is_written_once(
    ranks: tuple[int, int], pages: tuple[int, int], dtypes: tuple[str, str], lines: int
) -> None:
    units = math.lcm(*ranks)
    src, dst = (
        side(num_ranks, page_size, units, lines * LINE_NBYTES, dtype)
        for num_ranks, page_size, dtype in zip(ranks, pages, dtypes, strict=True)
    )
    state = np.random.default_rng(9).integers(0, 256, src[0].state_nbytes, np.uint8)
    arrived, times = send(src, dst, state)
    for layout, found, written in zip(dst, arrived, times, strict=True):
        right = state[layout.rank * layout.share_nbytes :][: layout.share_nbytes]
        assert found.ravel()[: layout.share_nbytes].tobytes() == right.tobytes()
        assert (written == 1).all()


def test_ranks_link_to_those_with_which_they_share_units() -> None:
    four, two = side(4, 4, 8, 128), side(2, 4, 8, 128)
    assert [linked_ranks(each, two) for each in four] == [(0,), (0,), (1,), (1,)]
    assert [linked_ranks(each, four) for each in two] == [(0, 1), (2, 3)]
    assert [linked_ranks(each, side(2, 8, 8, 128)) for each in two] == [(0,), (1,)]


@pytest.mark.parametrize(("sizes", "row"), [((64, 32), 32 << 10), ((48, 20), 8 << 10), ((3, 1), 2 << 10)])
def test_rows_are_as_large_as_pages_allow_and_fit_messages(sizes: tuple[int, int], row: int) -> None:
    src, dst = (side(1, size, 3, 1 << 20)[0] for size in sizes)
    copies = plan(src, dst)
    assert copies is not None
    packs = [run.copy.pack for run in copies.state]
    assert {pack.row_nbytes for pack in packs if pack is not None} == {row}
    assert row < MESSAGE_NBYTES


def test_equal_workers_send_whole_pages() -> None:
    for one, other in itertools.product(side(2, 4, 8, 1 << 12), repeat=2):
        copies = plan(one, other)
        if one.rank != other.rank:
            assert copies is None
            continue
        assert copies is not None
        assert [(run.copy.pack, run.copy.nbytes) for run in copies.state] == [(None, other.page_nbytes)]


def test_other_states_and_other_numbers_of_pages_are_refused() -> None:
    (one,), (other,) = side(1, 4, 8, 128), side(1, 4, 8, 256)
    with pytest.raises(LayoutMismatch, match="states of another model: 1024 and 2048 bytes"):
        plan(one, other)
    copies = plan(one, one)
    assert copies is not None
    with pytest.raises(TransferError, match="1 source pages and 1 target pages, not 1 and 2"):
        copies.cut(PageWrite(np.array([1]), np.array([1, 2]), as_bytes=True))
    with pytest.raises(ConfigError, match="3 ranks can't share a state of 1024 bytes in whole lines"):
        replace(one, num_ranks=3).validate()
