"""Which regions a model has, and what of them crosses the network between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_config import tiny_config

from diptych.architectures.config import DraftLayers, Indexer, Latent, ModelConfig, Rope, WideHeads
from diptych.checkpoints.shard import Shard
from diptych.engine.values.kv_regions import kv_layout, kv_regions, kv_shape, region_names
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.layout import HeadShare, PoolLayout, Region
from diptych.kvtransfer.plan import linked_ranks
from diptych.kvtransfer.transport import OpDone, PageWrite

NUM_PAGES = 8


def kv_token_bytes(model: ModelConfig, dtype: str) -> int:
    return sum(region.nbytes(1) for region in kv_regions(model, dtype))


LATENT = tiny_config(
    num_kv_heads=1,
    head_dim=48,
    rope=Rope(1e4, 16, start=32),
    latent=Latent(0, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6),
)
SPARSE = replace(
    LATENT,
    latent=Latent(28, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6),
    indexer=Indexer(4, 24, 8, interleaved=False, layers=(0,)),
)

KINDS = tiny_config(
    num_layers=6,
    windows=(8, 0) * 3,
    rope=Rope(1e4, 32),
    local_rope=Rope(1e4, 16),
    wide=WideHeads(32, 1, 1, 2),
    num_borrowing=3,
    keeps_all=True,
)


def test_layers_of_two_kinds_have_a_region_each_and_those_that_borrow_none() -> None:
    windows, wide = Region((0, 2), 2, 2, 16, "bfloat16", 2), Region((1,), 2, 1, 32, "bfloat16", 1)
    assert kv_regions(KINDS, "bfloat16") == (windows, wide)
    assert region_names(KINDS) == ("keys and values", "keys and values")
    assert kv_shape(KINDS) == "2 layers, 2 KV heads of 16, 1 layers, 1 KV heads of 32"
    assert kv_token_bytes(KINDS, "bfloat16") == 2 * (2 * 2 * 2 * 16 + 2 * 32)
    shapes = {kv_shape(replace(KINDS, **change)) for change in KIND_CHANGES}
    assert len(shapes | {kv_shape(KINDS)}) == 1 + len(KIND_CHANGES)


ONE_HEAD = replace(KINDS, num_kv_heads=1)  # of each kind, which all ranks hold
KIND_CHANGES: tuple[dict[str, Any], ...] = (
    {"wide": WideHeads(32, 2, 2, 2)},
    {"wide": WideHeads(64, 1, 1, 2)},
    {"num_kv_heads": 1},
    {"num_borrowing": 2},
    {"windows": (8, 0, 0, 8, 8, 0)},
)
DRAFTED = replace(LATENT, draft=DraftLayers(tiny_config(num_kv_heads=1), 1))


def test_of_four_ranks_each_holds_a_copy_of_the_heads_that_are_fewer() -> None:
    part = Shard(3, 4).config(replace(KINDS, wide=WideHeads(32, 4, 4, 2)))
    windows, wide = kv_regions(part, "float32", HeadShare(3, 4, 2))
    assert (windows.num_heads, windows.total_heads) == (1, 2)
    assert (wide.num_heads, wide.total_heads) == (1, 4)


UNLIKE = replace(
    KINDS,
    num_layers=9,
    windows=(8, 8, 8, 0, 8, 8, 0, 8, 0),
    wide=WideHeads(48, 1, 1, 2),
    num_borrowing=2,
    keeps_all=False,
)


def test_groups_of_layers_with_heads_of_two_widths_take_turns_in_pages_that_hold_any_of_them() -> None:
    """Two layers with one head of 48 take 96 numbers a token and plane; of those with two of 16, three do."""
    assert UNLIKE.page_groups == ((3, 6), (0, 1, 2), (4, 5))
    assert UNLIKE.layers_by_kind == ((3, 6, 8), (0, 1, 2), (4, 5, 7))  # those behind them borrow
    assert [(kind.num_layers, kind.num_kv_heads, kind.head_dim) for kind in UNLIKE.kinds] == [
        (3, 1, 48),
        (3, 2, 16),
        (3, 2, 16),
    ]
    assert [kind.num_borrowing for kind in UNLIKE.kinds] == [1, 0, 1]
    assert kv_regions(UNLIKE, "bfloat16") == (Region(tuple(range(6)), 2, 1, 16, "bfloat16", 1),)
    assert region_names(UNLIKE) == ("keys and values",)
    assert kv_shape(UNLIKE) == (
        "5 layers, 2 KV heads of 16, 2 layers, 1 KV heads of 48, windows of 8 in 2 pages of their own"
    )


def test_ranks_have_the_same_groups_where_those_with_wide_heads_outnumber_these() -> None:
    """Each of two has a half of a layer with a window, and all of the others: these decide how wide pages are."""
    parts = [Shard(rank, 2).config(UNLIKE) for rank in range(2)]
    assert {part.page_groups for part in parts} == {UNLIKE.page_groups}
    regions = {kv_regions(part, "bfloat16", HeadShare(rank, 2, 2)) for rank, part in enumerate(parts)}
    assert regions == {(Region(tuple(range(6)), 2, 1, 16, "bfloat16", 2),)}
    by_rank = layouts(UNLIKE, 2, 8)
    assert [linked_ranks(one, by_rank) for one in by_rank] == [(0,), (1,)]


def test_where_windows_have_pages_of_their_own_a_page_has_places_for_the_layers_that_see_all() -> None:
    model = tiny_config(num_layers=7, windows=(8, 8, 0, 8, 8, 8, 0))
    assert kv_regions(model, "bfloat16") == (Region((0, 1), 2, 2, 16, "bfloat16", 2),)
    assert kv_layout(model, 5, 16, "float32") == PoolLayout.kv(5, 2, 16, 2, 16, "float32")
    assert region_names(model) == ("keys and values",)
    assert kv_shape(model) == "7 layers, 2 KV heads of 16, windows of 8 in 3 pages of their own"
    assert kv_shape(replace(model, windows=(8, 8, 0, 8, 4, 4, 0))).endswith(
        ", windows of 4 and 8 in 3 pages of their own"
    )
    kept = replace(model, keeps_all=True)
    assert kv_regions(kept, "bfloat16") == (Region(tuple(range(7)), 2, 2, 16, "bfloat16", 2),)
    assert kv_shape(kept) == "7 layers, 2 KV heads of 16"


def test_keys_and_values_are_two_planes_and_a_latent_is_one() -> None:
    assert kv_regions(tiny_config(), "bfloat16") == (Region((0, 1), 2, 2, 16, "bfloat16", 2),)
    assert kv_regions(LATENT, "bfloat16") == (Region((0, 1), 1, 1, 48, "bfloat16", 1),)
    assert kv_regions(SPARSE, "bfloat16") == (*kv_regions(LATENT, "bfloat16"), Region((0,), 1, 1, 24, "bfloat16", 1))
    assert kv_layout(tiny_config(), 5, 16, "float32") == PoolLayout.kv(5, 2, 16, 2, 16, "float32")


def test_a_layer_that_attends_to_the_latents_of_another_has_its_index_keys_alone() -> None:
    model = replace(SPARSE, sources=(0, 0), indexer=Indexer(4, 24, 8, interleaved=False, layers=(0, 1)))
    assert kv_regions(model, "bfloat16") == (
        Region((0,), 1, 1, 48, "bfloat16", 1),
        Region((0, 1), 1, 1, 24, "bfloat16", 1),
    )
    assert kv_shape(model) == "2 layers, latents of 48 in 1 of them, index keys of 24 in 2 of them"
    assert kv_token_bytes(model, "bfloat16") == 2 * (48 + 2 * 24)


def test_words_and_bytes_are_those_of_the_regions() -> None:
    assert (kv_shape(tiny_config()), kv_shape(LATENT)) == ("2 layers, 2 KV heads of 16", "2 layers, latents of 48")
    assert kv_shape(SPARSE) == "2 layers, latents of 48, index keys of 24 in 1 of them"
    models = tiny_config(), LATENT, SPARSE
    assert [kv_token_bytes(model, "bfloat16") for model in models] == [2 * 2 * 2 * 16 * 2, 192, 192 + 48]
    assert [region_names(model) for model in models] == [
        ("keys and values",),
        ("latents",),
        ("latents", "index keys"),
    ]


def test_draft_layers_follow_those_of_their_model() -> None:
    own, behind = kv_regions(DRAFTED, "bfloat16")
    assert (own,) == kv_regions(LATENT, "bfloat16")
    assert behind == Region((2, 3), 2, 1, 16, "bfloat16", 1)
    assert region_names(DRAFTED) == ("latents", "draft keys and values")
    assert kv_shape(DRAFTED) == "2 layers, latents of 48, draft layers: 2 layers, 1 KV heads of 16"
    of_two = tiny_config(draft=DraftLayers(tiny_config(), 2))
    part = Shard(1, 2).config(of_two)
    assert [(region.num_heads, region.total_heads) for region in kv_regions(part, "bfloat16", HeadShare(1, 2, 2))] == [
        (1, 2),
        (1, 2),
    ]


def test_layers_with_a_window_of_a_draft_model_have_no_pages_of_their_own() -> None:
    """Those of the model may: draft layers are in each of its pages."""
    grouped, plain = tiny_config(num_layers=4, windows=(0, 8) * 2), tiny_config()
    assert len(grouped.page_groups) == 2
    with pytest.raises(AssertionError, match="keep all tokens"):
        kv_regions(replace(plain, draft=DraftLayers(grouped, 2)), "bfloat16")
    assert len(kv_regions(replace(grouped, draft=DraftLayers(plain, 2)), "bfloat16")) == 2


def layouts(model: ModelConfig, num_ranks: int, page_size: int) -> list[PoolLayout]:
    """Return the layout of each rank of a worker."""
    if num_ranks == 1:
        return [kv_layout(model, NUM_PAGES, page_size, "float32")]
    parts = [Shard(rank, num_ranks).config(model) for rank in range(num_ranks)]
    shares = [HeadShare(rank, num_ranks, model.num_kv_heads) for rank in range(num_ranks)]
    return [kv_layout(part, NUM_PAGES, page_size, "float32", share) for part, share in zip(parts, shares, strict=True)]


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("page_sizes", [(8, 8), (4, 16)], ids=["equal pages", "larger pages"])
@pytest.mark.parametrize(
    "model",
    [LATENT, SPARSE, ONE_HEAD, DRAFTED],
    ids=["latents", "latents and index keys", "two kinds", "draft layers"],
)
def test_a_latent_lands_once_in_every_target_however_many_ranks_hold_it(
    num_sources: int, num_targets: int, page_sizes: tuple[int, int], model: ModelConfig
) -> None:
    """Bytes sent are those of the targets' pages: nothing is sent once more for another source that has it, too."""
    network, num_tokens = InprocNetwork(), 32
    src, dst = (layouts(model, *each) for each in zip((num_sources, num_targets), page_sizes, strict=True))
    sources = [network.transport(1 + rank) for rank in range(num_sources)]
    targets = [network.transport(101 + rank) for rank in range(num_targets)]
    kept = np.random.default_rng(0).integers(0, 256, src[0].nbytes, np.uint8)
    for end, layout in zip(sources, src, strict=True):
        end.allocate_pool(layout).buffer[:] = kept.data
    pools = [end.allocate_pool(layout) for end, layout in zip(targets, dst, strict=True)]
    links = [(one, 101 + rank) for one, own in zip(sources, src, strict=True) for rank in linked_ranks(own, dst)]
    for one, peer in links:
        one.connect(peer, targets[peer - 101].metadata())
    for end, layout in zip(targets, dst, strict=True):
        for rank in linked_ranks(layout, src):
            end.connect(1 + rank, sources[rank].metadata())
    network.deliver_all()
    pages = [np.arange(num_tokens // size) for size in page_sizes]
    for one, peer in links:
        one.write_pages(peer, PageWrite(pages[0], pages[1]), b"", Flow(7, with_digest=True))
    network.deliver_all()
    done: list[Any] = [event for end in sources for event in end.poll() if isinstance(event, OpDone)]
    assert {event.error for event in done} == {None}
    sent = sum(one.describe(peer).bytes_sent for one, peer in links)
    assert sent == num_targets * num_tokens * kv_token_bytes(model, "float32")
    tokens = _tokens(kept, src[0], pages[0])
    for pool, layout in zip(pools, dst, strict=True):
        assert np.array_equal(_tokens(np.frombuffer(pool.buffer, np.uint8), layout, pages[1]), tokens)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pages_that_unlike_groups_share_are_cast_on_their_way_whatever_they_hold(num_ranks: int) -> None:
    share = HeadShare(0, num_ranks, 2) if num_ranks > 1 else None
    model = UNLIKE if share is None else Shard(0, num_ranks).config(UNLIKE)
    src, dst = (kv_layout(model, NUM_PAGES, 8, dtype, share) for dtype in ("float32", "bfloat16"))
    network = InprocNetwork()
    source, target = network.transport(1), network.transport(2)
    kept = np.random.default_rng(0).normal(size=src.nbytes // 4).astype(np.float32)
    source.allocate_pool(src).buffer[:] = kept.view(np.uint8).data
    landed = target.allocate_pool(dst)
    source.connect(2, target.metadata())
    target.connect(1, source.metadata())
    network.deliver_all()
    pages = np.arange(NUM_PAGES)
    source.write_pages(2, PageWrite(pages, pages[::-1].copy()), b"", Flow(7, with_digest=True))
    network.deliver_all()
    assert [event.error for event in source.poll() if isinstance(event, OpDone)] == [None]
    found = torch.frombuffer(landed.buffer, dtype=torch.bfloat16, count=dst.nbytes // 2).view(NUM_PAGES, -1)
    assert torch.equal(found.flip(0), torch.from_numpy(kept).view(NUM_PAGES, -1).bfloat16())


def _tokens(pool: Any, layout: PoolLayout, pages: Any) -> Any:
    """Return `[num_tokens, bytes]`, region by region."""
    found, used = [], pool[: layout.nbytes].reshape(layout.num_pages, -1)[pages]
    for region, start in zip(layout.regions, layout.offsets, strict=True):
        bytes_of_region = used[:, start : start + region.nbytes(layout.page_size)]
        cells = bytes_of_region.reshape(len(pages), len(region.layers) * region.num_planes, layout.page_size, -1)
        found.append(cells.transpose(0, 2, 1, 3).reshape(len(pages) * layout.page_size, -1))
    return np.concatenate(found, axis=1)
