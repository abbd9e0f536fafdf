"""Workers whose ranks have some of the layers each: plans, executed in numpy, and links over the in-process network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.kernels.page_pack import CELLS, cast, pack_page
from diptych.kvtransfer.errors import LayoutMismatch
from diptych.kvtransfer.layout import HeadShare, PoolLayout, layout_from_wire, layout_to_wire
from diptych.kvtransfer.plan import Conversion, Shard, check_on_device, lands_in_parts, linked_ranks, parts_of, plan
from diptych.kvtransfer.transport import PageWrite

Array = np.ndarray[Any, Any]
LAYERS, DIM, NUM_PAGES = 5, 8, 16


def stage_layouts(
    cuts: Sequence[int], num_ranks: int, heads: int, page_size: int = 4, dtype: str = "float32", dim: int = DIM
) -> list[PoolLayout]:
    """The pools of all ranks, stage by stage; `cuts`: the first layers of the stages behind the first."""
    layouts = []
    for first, end in itertools.pairwise((0, *cuts, LAYERS)):
        for rank in range(num_ranks):
            share = HeadShare(rank, num_ranks, heads)
            own = max(1, heads // num_ranks)
            layout = PoolLayout.kv(NUM_PAGES, LAYERS, page_size, own, dim, dtype, share)
            every = layout.sole_region.layers
            if cuts:
                region = replace(layout.sole_region, layers=every[first:end], total_layers=every)
                layout = replace(layout, regions=(region,))
            layout.validate()
            layouts.append(layout)
    return layouts


@st.composite
def sides(draw: st.DrawFn, heads: int) -> list[PoolLayout]:
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0 or n % heads == 0]))
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=3)))
    return stage_layouts(cuts, ranks, heads, draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from(list(CELLS))))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 6]))
def test_every_number_of_every_layer_arrives_where_it_belongs(data: st.DataObject, heads: int) -> None:
    src, dst = data.draw(sides(heads)), data.draw(sides(heads))
    num_tokens = 12
    numbers = np.random.default_rng(0).standard_normal((num_tokens, LAYERS, 2, heads, DIM)).astype(np.float32)
    tokens = cast(numbers, "float32", src[0].dtype)
    pools = [filled(layout, tokens) for layout in src]
    landed = [np.full((NUM_PAGES, layout.page_nbytes), 0xEE, np.uint8) for layout in dst]
    src_pages, dst_pages = (np.arange(-(-num_tokens // each[0].page_size)) for each in (src, dst))
    for (a, one), (b, other) in itertools.product(enumerate(src), enumerate(dst)):
        copies = plan(one, other)
        assert (copies is not None) <= (b in linked_ranks(one, dst))
        for runs in () if copies is None else copies.cut(PageWrite(src_pages, dst_pages)):
            for i, page in enumerate(runs.dst):
                image = pool_image(runs, pools[a], i)
                window = runs.window
                landed[b][page, window.dst : window.dst + window.nbytes] = image
    wanted = cast(tokens, src[0].dtype, dst[0].dtype)
    (in_parts,) = {lands_in_parts(src, each) for each in dst}  # all say the same
    for layout, pool in zip(dst, landed, strict=True):
        if in_parts:
            unpack(src, layout, pool, dst_pages)
        assert_holds(layout, pool, wanted)


def pool_image(runs: Any, pool: Array, i: int) -> Array:
    if runs.pack is not None:
        return pack_page(runs.pack, pool, runs.src, int(runs.first_tokens[i]))
    return pool[runs.src[i], runs.window.src : runs.window.src + runs.window.nbytes]


def filled(layout: PoolLayout, tokens: Array) -> Array:
    (shard,) = Shard.all_of(layout)
    pool = np.zeros((NUM_PAGES, layout.page_nbytes), np.uint8)
    for token, kv in enumerate(tokens):
        page, offset = divmod(token, layout.page_size)
        view(layout, pool)[page, :, :, offset] = kv[list(shard.region.layers), :, shard.first_head : shard.end_head]
    return pool


def view(layout: PoolLayout, pool: Array) -> Array:
    return pool.view(CELLS[layout.dtype]).reshape(layout.shape)


def unpack(src: Sequence[PoolLayout], layout: PoolLayout, pool: Array, pages: Array) -> None:
    """Once for each stage of the source that has layers of ours."""
    stages = {each.sole_region.layers: each for each in src if linked_ranks(layout, [each])}
    for stage in stages.values():
        for parts in parts_of(stage, layout):
            for page in pages if len(parts.heads) > 1 else ():
                parts.unpack(pool[page])


def assert_holds(layout: PoolLayout, pool: Array, wanted: Array) -> None:
    (shard,) = Shard.all_of(layout)
    for token, kv in enumerate(wanted):
        page, offset = divmod(token, layout.page_size)
        found = view(layout, pool)[page, :, :, offset]
        assert found.tobytes() == kv[list(shard.region.layers), :, shard.first_head : shard.end_head].tobytes()


def test_a_stage_writes_to_the_stages_that_have_its_layers_alone() -> None:
    src, dst = stage_layouts((2,), 1, 2), stage_layouts((1, 3), 1, 2)
    assert [linked_ranks(each, dst) for each in src] == [(0, 1), (1, 2)]
    copies = plan(src[1], dst[1])
    assert copies is not None
    (runs,) = copies.cut(PageWrite(np.array([3]), np.array([5])))
    layer_nbytes = src[0].layer_nbytes
    assert (runs.pack, runs.window.src, runs.window.dst, runs.window.nbytes) == (None, 0, layer_nbytes, layer_nbytes)


@pytest.mark.parametrize("head_dim", [8, 72])
def test_between_a_stage_and_all_layers_pages_move_as_they_are_on_devices_too(head_dim: int) -> None:
    """Kernels that rearrange pages know no heads of 72."""
    (whole,), stages = stage_layouts((), 1, 2, dim=head_dim), stage_layouts((2,), 1, 2, dim=head_dim)
    for stage, first in zip(stages, (0, 2), strict=True):
        for src, dst, at in ((stage, whole, (0, first)), (whole, stage, (first, 0))):
            copies = plan(src, dst)
            assert copies is not None
            (runs,) = copies.cut(PageWrite(np.array([3]), np.array([5])))
            assert runs.pack is None
            begins = tuple(layer * whole.layer_nbytes for layer in at)
            assert (runs.window.src, runs.window.dst, runs.window.nbytes) == (*begins, stage.page_nbytes)
            check_on_device(Conversion.between(src, dst), src)


def test_a_stage_of_another_model_is_refused_though_its_layers_are_there() -> None:
    stage = stage_layouts((2,), 1, 2)[0]
    region = replace(stage.sole_region, total_layers=(0, 1, 2))
    with pytest.raises(LayoutMismatch, match=r"another model: .* \[5, 2, 2, 8\] and \[3, 2, 2, 8\]"):
        plan(stage_layouts((), 1, 2)[0], replace(stage, regions=(region,)))


@pytest.mark.parametrize("layers", [(0, 2), (4, 5), (5,)])
def test_what_is_no_run_of_a_models_layers_is_refused(layers: tuple[int, ...]) -> None:
    stage = stage_layouts((2,), 1, 2)[0]
    region = replace(stage.sole_region, layers=layers)
    wire = layout_to_wire(replace(stage, regions=(region,)))
    with pytest.raises(ConfigError, match="of a stage"):
        layout_from_wire(wire).validate()
