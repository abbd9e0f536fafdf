"""Runs of states between workers of any pages, types and ranks: every byte arrives where it belongs, once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.kernels.page_pack import pack_page
from diptych.kvtransfer.errors import LayoutMismatch, TransferError
from diptych.kvtransfer.layout import LINE_NBYTES, HeadShare, PoolLayout
from diptych.kvtransfer.plan import MESSAGE_NBYTES, linked_ranks, plan
from diptych.kvtransfer.transport import PageWrite

Array = np.ndarray[Any, Any]
NUM_PAGES = 60


def side(num_ranks: int, page_size: int, units: int, unit_nbytes: int, dtype: str = "float32") -> list[PoolLayout]:
    """The layouts of a worker's ranks."""
    shares = [HeadShare(rank, num_ranks, 24) for rank in range(num_ranks)]
    pages = [PoolLayout.kv(NUM_PAGES, 2, page_size, 24 // num_ranks, 16, dtype, share) for share in shares]
    return [replace(each, state_nbytes=units * unit_nbytes) for each in pages]


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
