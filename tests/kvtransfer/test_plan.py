"""Plans, executed in numpy and compared with a dense tensor of the whole model's KV, number by number."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.kernels.page_pack import CELLS, cast, pack_page
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.kvtransfer.errors import LayoutMismatch, TransferError
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.plan import Conversion, Shard, check_on_device, lands_in_parts, linked_ranks, parts_of, plan
from diptych.kvtransfer.runs import ByteWindow, Copy
from diptych.kvtransfer.transport import PageWrite

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Side:
    """The pools of all ranks of one worker."""

    shards: tuple[Shard, ...]
    num_pages: int

    @staticmethod
    def of(num_ranks: int, *, heads: int, layers: int, page_size: int, dim: int, dtype: str, num_pages: int) -> Side:
        own = max(1, heads // num_ranks)
        shares = [HeadShare(rank, num_ranks, heads) for rank in range(num_ranks)]
        layouts = [PoolLayout.kv(num_pages, layers, page_size, own, dim, dtype, share) for share in shares]
        return Side(tuple(shard for layout in layouts for shard in Shard.all_of(layout)), num_pages)

    @property
    def layouts(self) -> list[PoolLayout]:
        return [shard.layout for shard in self.shards]

    @property
    def layout(self) -> PoolLayout:
        return self.shards[0].layout

    def new_pools(self) -> list[Array]:
        """Every byte of them 0xEE."""
        return [np.full((self.num_pages, self.layout.page_nbytes), 0xEE, np.uint8) for _ in self.shards]

    def view(self, pool: Array) -> Array:
        return pool.view(CELLS[self.layout.dtype]).reshape(self.layout.shape)


@dataclass(frozen=True)
class Case:
    """A prompt's tokens `[start, end)` go from one worker to another."""

    src: Side
    dst: Side
    start: int  # a multiple of the target's page size
    end: int
    seed: int

    def tokens(self) -> Array:
        """The model's KV, `[end, layers, 2, heads, dim]` as cells of the source."""
        shard = self.src.shards[0]
        shape = (self.end, shard.layout.num_layers, 2, shard.region.total_heads, shard.region.head_dim)
        numbers = np.random.default_rng(self.seed).standard_normal(shape).astype(np.float32) * 100
        return cast(numbers, "float32", shard.layout.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    ranks = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]
    model = {"heads": heads, "layers": draw(st.integers(1, 3)), "dim": draw(st.sampled_from([4, 8, 12]))}
    sides = [
        Side.of(
            draw(st.sampled_from(ranks)),
            page_size=draw(st.sampled_from([1, 2, 3, 4, 6, 16])),
            dtype=draw(st.sampled_from(list(DTYPE_NBYTES))),
            num_pages=40,
            **model,
        )
        for _ in range(2)
    ]
    end = draw(st.integers(1, 40))
    page_size = sides[1].layout.page_size
    start = draw(st.integers(0, (end - 1) // page_size)) * page_size
    return Case(sides[0], sides[1], start, end, draw(st.integers(0, 2**32 - 1)))


def fill(case: Case, pages: Array) -> list[Array]:
    """Put the prompt into the source's pools, as prefill has it: from the first page on."""
    tokens, pools = case.tokens(), case.src.new_pools()
    for shard, pool in zip(case.src.shards, pools, strict=True):
        for token in range(case.end):
            page, offset = divmod(token, shard.layout.page_size)
            case.src.view(pool)[pages[page], :, :, offset] = tokens[token][:, :, shard.first_head : shard.end_head]
    return pools


@dataclass
class Executed:
    pools: list[Array]  # the target's
    runs: Counter[tuple[int, int]]  # (target rank, target page) -> runs on the wire
    nbytes: Counter[int]  # source rank -> bytes on the wire


def execute(case: Case, pages: Array, pools: list[Array], dst_pages: Array) -> Executed:
    """Do what the plans say, then unpack."""
    done = Executed(case.dst.new_pools(), Counter(), Counter())
    first, skip = divmod(case.start, case.src.layout.page_size)
    src_pages = pages[first : -(-case.end // case.src.layout.page_size)]
    for src, dst in itertools.product(case.src.layouts, case.dst.layouts):
        copies = plan(src, dst)
        assert (copies is not None) <= (dst.rank in linked_ranks(src, case.dst.layouts))
        if copies is None:
            continue
        (copy,) = copies.regions
        (runs,) = copies.cut(PageWrite(src_pages, dst_pages, None, skip))
        assert runs.window == ByteWindow(0, copy.dst, copy.nbytes)
        for i, page in enumerate(runs.dst):
            pool = pools[src.rank]
            if runs.pack is None:
                image = pool[runs.src[i]]
            else:
                image = pack_page(runs.pack, pool, runs.src, int(runs.first_tokens[i]))
            assert len(image) == copy.nbytes
            done.pools[dst.rank][page, copy.dst : copy.dst + copy.nbytes] = image
            done.runs[dst.rank, int(page)] += 1
            done.nbytes[src.rank] += copy.nbytes
    unpack(case, dst_pages, done.pools)
    return done


def unpack(case: Case, dst_pages: Array, pools: list[Array]) -> None:
    for dst in case.dst.layouts:
        (parts,) = parts_of(case.src.layout, dst)
        if len(parts.heads) > 1:
            for page in dst_pages:
                parts.unpack(pools[dst.rank][page])


@settings(max_examples=120, deadline=None)
@given(cases())
def test_every_number_arrives_where_it_belongs_in_one_run_a_page_and_part(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    pages, dst_pages = rng.permutation(40), rng.permutation(40)
    dst_pages = dst_pages[: -(-(case.end - case.start) // case.dst.layout.page_size)]
    done = execute(case, pages, fill(case, pages), dst_pages)
    wanted = cast(case.tokens(), case.src.layout.dtype, case.dst.layout.dtype)
    for dst, pool in zip(case.dst.shards, done.pools, strict=True):
        for token in range(case.start, case.end):
            page, offset = divmod(token - case.start, dst.layout.page_size)
            found = case.dst.view(pool)[dst_pages[page], :, :, offset]
            assert found.tobytes() == wanted[token][:, :, dst.first_head : dst.end_head].tobytes()
        others = np.setdiff1d(np.arange(40), dst_pages)
        assert (pool[others] == 0xEE).all()
        num_parts = len(parts_of(case.src.layout, dst.layout)[0].heads)
        assert {done.runs[dst.layout.rank, page] for page in dst_pages.tolist()} == {num_parts}
    assert done.nbytes.total() == len(dst_pages) * case.dst.layout.page_nbytes * len(case.dst.shards)


def side(num_ranks: int, heads: int = 2, **changes: Any) -> Side:
    fields = {"layers": 2, "page_size": 16, "dim": 8, "dtype": "bfloat16", "num_pages": 64}
    return Side.of(num_ranks, heads=heads, **{**fields, **changes})


def the_copy(src: PoolLayout, dst: PoolLayout) -> Copy:
    copies = plan(src, dst)
    assert copies is not None
    (copy,) = copies.regions
    return copy


@pytest.mark.parametrize(
    ("num_src", "num_dst", "heads", "by_rank"),
    [
        (2, 3, 6, [1, 2, 1]),
        (3, 2, 6, [2, 2]),
        (3, 4, 12, [1, 2, 2, 1]),
        (4, 2, 12, [2, 2]),
        (2, 4, 12, [1, 1, 1, 1]),
        (2, 8, 4, [1] * 8),
        (8, 2, 4, [2, 2]),
        (3, 3, 6, [1, 1, 1]),
    ],
)
def test_each_rank_of_the_target_knows_whether_any_has_parts(
    num_src: int, num_dst: int, heads: int, by_rank: list[int]
) -> None:
    src, dst = side(num_src, heads), side(num_dst, heads)
    assert [len(parts_of(src.layout, each)[0].heads) for each in dst.layouts] == by_rank
    assert {lands_in_parts(src.layouts, each) for each in dst.layouts} == {max(by_rank) > 1}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_equal_workers_send_whole_pages_from_rank_to_rank(num_ranks: int) -> None:
    one, other = side(num_ranks), side(num_ranks)
    for src in one.layouts:
        sent = {dst.rank: the_copy(src, dst) for dst in other.layouts if plan(src, dst)}
        assert {rank: (copy.pack, copy.num_turns) for rank, copy in sent.items()} == {src.rank: (None, 1)}
        assert linked_ranks(src, other.layouts) == (src.rank,)


@pytest.mark.parametrize(("num_src", "num_dst"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 4), (8, 2), (1, 4), (2, 8)])
def test_ranks_with_the_same_heads_share_the_work_evenly(num_src: int, num_dst: int) -> None:
    src, dst = side(num_src), side(num_dst)
    pages, sent = np.arange(32), Counter[int]()
    for one, other in itertools.product(src.layouts, dst.layouts):
        copies = plan(one, other)
        if copies:
            (runs,) = copies.cut(PageWrite(pages, pages))
            sent[one.rank] += runs.window.nbytes * len(runs.dst)
    assert set(sent.values()) == {32 * dst.layout.page_nbytes * num_dst // num_src}
    assert len(sent) == num_src


def test_a_grant_that_begins_inside_a_page_skips_its_first_tokens() -> None:
    copies = plan(side(1, page_size=64).layouts[0], side(1).layouts[0])
    assert copies is not None
    (runs,) = copies.cut(PageWrite(np.array([7, 9]), np.array([3, 4, 5]), None, 48))
    assert [runs.src.tolist(), runs.first_tokens.tolist(), runs.dst.tolist()] == [
        [7, 9],
        [48, 64, 80],
        [3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (side(1, layers=3), r"another model: .* \[2, 2, 2, 8\] and \[3, 2, 2, 8\]"),
        (side(1, heads=4), "another model"),
        (side(1, dim=16), "another model"),
        (side(1, page_size=1, dim=8, dtype="fp8_e4m3"), None),
    ],
)
def test_what_can_not_be_converted_is_refused_with_a_reason(other: Side, problem: str | None) -> None:
    if problem is None:
        assert plan(side(1).layouts[0], other.layouts[0]) is not None
        return
    with pytest.raises(LayoutMismatch, match=problem):
        plan(side(1).layouts[0], other.layouts[0])


def test_a_token_larger_than_a_message_is_refused() -> None:
    sides = [side(1, heads=64, dim=4096, page_size=size, dtype="bfloat16").layout for size in (16, 32)]
    with pytest.raises(LayoutMismatch, match=r"a token of 524288 bytes in one layer .* a larger --tp"):
        plan(*sides)
    assert plan(sides[0], sides[0]) is not None


def test_parts_that_are_no_whole_words_are_refused() -> None:
    small = side(1, page_size=1, dim=1, dtype="fp8_e4m3")
    with pytest.raises(LayoutMismatch, match="multiple of 8 bytes; use larger pages"):
        plan(side(2, dim=1, page_size=1).layouts[0], small.layouts[0])


@pytest.mark.parametrize(("heads", "share"), [(2, (0, 1, 4)), (1, (2, 2, 2)), (1, (0, 2, 3))])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(heads: int, share: tuple[int, int, int]) -> None:
    layout = PoolLayout.kv(64, 2, 16, heads, 8, "bfloat16", HeadShare(*share))
    with pytest.raises(LayoutMismatch, match="can't hold"):
        plan(layout, layout)


@pytest.mark.parametrize(
    ("src_size", "dst_size", "num_ranks", "dim", "problem"),
    [
        (16, 64, 2, 16, None),
        (2, 2, 1, 8, None),  # nothing is converted
        (16, 64, 2, 24, "a device can't convert heads whose sizes are no multiples of 16"),
        (4, 2, 4, 16, "a device can't convert parts of pages that are no multiples of 128 bytes"),
        (16, 16 * 16382, 1, 16, "a device can't convert such small pages into such large ones"),
    ],
)
def test_a_device_converts_whole_lines_of_heads_of_whole_steps(
    src_size: int, dst_size: int, num_ranks: int, dim: int, problem: str | None
) -> None:
    src, dst = (
        PoolLayout.kv(8, 3, size, 4 // num_ranks, dim, "fp8_e4m3", HeadShare(0, num_ranks, 4))
        for size in (src_size, dst_size)
    )
    conversion = Conversion.between(src, dst)
    if problem is None:
        check_on_device(conversion, src)
    else:
        with pytest.raises(LayoutMismatch, match=problem):
            check_on_device(conversion, src)


def test_a_device_refuses_states_of_odd_lines_though_tokens_move_as_they_are() -> None:
    """Two KV heads on two ranks are one each on four, too; the states of the same model are cut, into 64 cells."""
    src, dst = (
        replace(PoolLayout.kv(100, 4, 16, 1, 256, "bfloat16", HeadShare(0, num, 2)), state_nbytes=8 * 384)
        for num in (2, 4)
    )
    conversion = Conversion.between(src, dst)
    assert not conversion.parts
    assert not conversion.packs
    with pytest.raises(LayoutMismatch, match="pages whose sizes have so little in common"):
        check_on_device(conversion, src)


def test_parts_of_pages_land_in_a_device_in_whole_lines() -> None:
    peer, own = (PoolLayout.kv(8, 1, 2, 4 // num, 16, "fp8_e4m3", HeadShare(0, num, 4)) for num in (2, 1))
    with pytest.raises(LayoutMismatch, match="no multiples of 128 bytes: give both workers the same --tp"):
        check_on_device(Conversion.between(own, peer), own)


def test_layers_are_a_window_of_each_part() -> None:
    copies = plan(side(2, layers=4, page_size=2).layouts[1], side(1, layers=4, page_size=8).layouts[0])
    assert copies is not None
    assert copies.regions[0].pack is not None
    head_layer = 2 * 8 * 8 * 2  # bytes: K and V, tokens, head size, bfloat16
    write = PageWrite(np.arange(4), np.array([1]), (1, 3))
    (runs,) = copies.cut(write)
    assert runs.window == ByteWindow(head_layer, 4 * head_layer + head_layer, 2 * head_layer)


@pytest.mark.parametrize("layers", [(0, 0), (1, 3), (-1, 1)])
def test_layers_that_pages_do_not_have_are_refused(layers: tuple[int, int]) -> None:
    copies = plan(side(1).layouts[0], side(1, page_size=8).layouts[0])
    assert copies is not None
    with pytest.raises(TransferError, match="are not in pages of 2 layers"):
        copies.cut(PageWrite(np.arange(1), np.arange(2), layers))


def test_whole_pages_go_one_to_one() -> None:
    copies = plan(side(1).layouts[0], side(1).layouts[0])
    assert copies is not None
    with pytest.raises(TransferError, match="2 source pages but 1 target pages"):
        copies.cut(PageWrite(np.arange(2), np.arange(1)))
