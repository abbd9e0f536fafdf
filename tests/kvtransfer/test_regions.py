"""Pages of two regions, K and V of four heads and a latent of another size and type, over every transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import ConfigError
from diptych.kernels.page_pack import CELLS, cast
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.kvtransfer.plan import Shard, parts_of, plan
from diptych.kvtransfer.runs import ByteWindow
from diptych.kvtransfer.transport import NoteReceived, OpDone, PageWrite

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]
Array = np.ndarray[Any, Any]

NUM_PAGES, NUM_TOKENS = 16, 40


def two_regions(
    page_size: int = 8, kv: str = "bfloat16", *, rank: int = 0, num_ranks: int = 1, latent_dim: int = 24
) -> PoolLayout:
    """The model has five layers: K and V of four heads in three of them, latents in the other two."""
    heads = Region((0, 2, 3), 2, 4 // num_ranks, 16, kv, 4)
    latent = Region((1, 4), 1, 1, latent_dim, "float32", 1)
    return PoolLayout(NUM_PAGES, page_size, (heads, latent), rank, num_ranks)


CASES = {
    "equal": (two_regions(), two_regions()),
    "one region is cast": (two_regions(), two_regions(kv="fp8_e4m3")),
    "larger pages": (two_regions(4), two_regions(8)),
    "smaller pages": (two_regions(16), two_regions(4, "float32")),
}


def rows(layout: PoolLayout, pages: Array) -> list[Array]:
    """Bytes of pages `[num_pages, page_nbytes]` as `[tokens, layers, planes, heads, dim]`, for each region."""
    found = []
    for region, at in zip(layout.regions, layout.offsets, strict=True):
        nbytes = region.nbytes(layout.page_size)
        cells = pages[:, at : at + nbytes].copy().view(CELLS[region.dtype])
        shape = region.shape(layout.page_size)
        found.append(np.moveaxis(cells.reshape(len(pages), *shape), 3, 1).reshape(-1, *shape[:2], *shape[3:]))
    return found


def read(end: Any, pages: list[int]) -> Array:
    return np.frombuffer(end.read(pages), np.uint8).reshape(len(pages), -1)


def move(
    src: PoolLayout, dst: PoolLayout, make: Make, link: Link, path: str | None = None, windows: Any = None
) -> None:
    """Move a prompt, and compare digests, and every number of every region."""
    sender, receiver = make(1, src), make(2, dst)
    link(sender, receiver)
    if path is not None:
        sender.use_path(2, path)
    sender.fill(5)
    receiver.fill(6)
    src_pages = [NUM_PAGES - 1 - page for page in range(-(-NUM_TOKENS // src.page_size))]
    dst_pages = [(page * 3 + 1) % NUM_PAGES for page in range(-(-NUM_TOKENS // dst.page_size))]
    options = {"stream": 7, "with_digest": True}
    ops = [sender.write(2, src_pages, dst_pages, layers=layers, **options) for layers in windows or [None]]
    sender.note(2, b"done", stream=7)
    done = [sender.wait_done(op) for op in ops]
    assert {event.error for event in done} == {None}
    note, op = receiver.wait_note(), receiver.digest_pages(dst_pages)
    assert note.digest == receiver.wait_done(op).digest == add_digests(*(event.digest for event in done))
    assert not receiver.lands_in_parts(1)
    sent, found = rows(src, read(sender, src_pages)), rows(dst, read(receiver, dst_pages))
    for one, other, region, target in zip(sent, found, src.regions, dst.regions, strict=True):
        wanted = cast(one[:NUM_TOKENS], region.dtype, target.dtype)
        assert other[:NUM_TOKENS].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("layouts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("windows", [None, [(0, 1), (1, 2), (2, 5)]], ids=["whole", "layers"])
def test_both_regions_arrive_with_equal_digests(
    make_inproc_end: Make, link: Link, layouts: tuple[PoolLayout, PoolLayout], windows: Any
) -> None:
    network = InprocNetwork()
    move(*layouts, lambda instance, layout: make_inproc_end(network, instance, layout), link, windows=windows)


@pytest.mark.parametrize("layouts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("path", ["copy", "message"])
@pytest.mark.parametrize("windows", [None, [(0, 1), (1, 2), (2, 5)]], ids=["whole", "layers"])
def test_ucx_moves_both_regions_on_every_path(
    make_child_end: Make, link: Link, layouts: tuple[PoolLayout, PoolLayout], path: str, windows: Any
) -> None:
    move(*layouts, lambda instance, layout: make_child_end("shm", instance, layout), link, path, windows)


@pytest.mark.parametrize("case", CASES)
def test_devices_move_both_regions(make_device_end: Make, link: Link, case: str) -> None:
    layouts = ((layout.page_size, layout.regions[0].dtype) for layout in CASES[case])
    src, dst = (two_regions(page_size, dtype, latent_dim=32) for page_size, dtype in layouts)
    move(src, dst, make_device_end, link, windows=[(0, 2), (2, 5)])


def test_devices_convert_heads_of_whole_steps_only(make_child_end: Make) -> None:
    src, dst = (make_child_end("emulated-mover", page_size, two_regions(page_size)) for page_size in (16, 32))
    with pytest.raises(Exception, match="a device can't convert heads whose sizes are no multiples of 16: give both"):
        src.connect(dst.instance_id, dst.metadata())


@pytest.mark.parametrize("layouts", CASES.values(), ids=CASES)
def test_nixl_moves_both_regions(
    make_child_end: Make, link: Link, has_nixl: None, layouts: tuple[PoolLayout, PoolLayout]
) -> None:
    windows = [(0, 1), (1, 5)]
    move(*layouts, lambda instance, layout: make_child_end("nixl-shm", instance, layout), link, windows=windows)


def test_parts_of_one_region_are_put_together_and_the_other_stays() -> None:
    """Two ranks write to one: the latent, which both hold, comes once."""
    network, layout = InprocNetwork(), two_regions()
    ends, receiver = [network.transport(1 + rank) for rank in range(2)], network.transport(9)
    pool = receiver.allocate_pool(layout)
    kv, latent = (np.random.default_rng(0).integers(0, 256, (NUM_PAGES, n), np.uint8) for n in sizes(layout))
    heads = kv.reshape(NUM_PAGES, 3, 2, 8, 4, -1)
    for rank, end in enumerate(ends):
        mine = heads[..., 2 * rank : 2 * rank + 2, :].reshape(NUM_PAGES, -1)
        own = end.allocate_pool(two_regions(rank=rank, num_ranks=2))
        own.buffer[:] = np.concatenate([mine, latent], axis=1).tobytes()
        end.connect(9, receiver.metadata())
        receiver.connect(1 + rank, end.metadata())
    network.deliver_all()
    pages = np.arange(NUM_PAGES)
    for end in ends:
        end.write_pages(9, PageWrite(pages, pages))
    network.deliver_all()
    assert sum(end.describe(9).bytes_sent for end in ends) == layout.nbytes, "nothing is sent twice"
    receiver.unpack_pages(1, pages)
    network.deliver_all()
    assert pool.buffer.tobytes() == np.concatenate([kv, latent], axis=1).tobytes()


def sizes(layout: PoolLayout) -> list[int]:
    return [region.nbytes(layout.page_size) for region in layout.regions]


def test_a_page_is_its_regions_one_behind_the_other_and_its_digest_their_sum() -> None:
    layout = two_regions()
    first, second = sizes(layout)
    assert (layout.offsets, layout.page_nbytes, layout.num_layers) == ((0, first), first + second, 5)
    page = np.random.default_rng(0).integers(0, 256, layout.page_nbytes, np.uint8)
    at = 3 * layout.page_nbytes
    parts = (digest_bytes(page[:first], at), digest_bytes(page[first:], at + first))
    assert digest_bytes(page, at) == add_digests(*parts)


def test_regions_that_lie_together_on_both_sides_move_as_one_run() -> None:
    layout = two_regions()
    assert windows(layout, layout, None) == [ByteWindow(0, 0, layout.page_nbytes)]
    kv, latent = (region.layer_nbytes(8) for region in layout.regions)
    assert windows(layout, layout, (1, 3)) == [ByteWindow(kv, kv, kv), ByteWindow(3 * kv, 3 * kv, latent)]
    assert windows(layout, layout, (1, 2)) == [ByteWindow(3 * kv, 3 * kv, latent)]


def test_a_region_that_is_equal_moves_as_it_is_beside_one_that_is_not() -> None:
    src, dst = two_regions(), two_regions(kv="fp8_e4m3")
    latent = src.regions[1].nbytes(8)
    assert windows(src, dst, None)[1] == ByteWindow(src.offsets[1], dst.offsets[1], latent)
    copies = plan(src, dst)
    assert copies is not None
    assert [copy.pack is None for copy in copies.regions] == [False, True]


def windows(src: PoolLayout, dst: PoolLayout, layers: tuple[int, int] | None) -> list[ByteWindow]:
    copies = plan(src, dst)
    assert copies is not None
    return [runs.window for runs in copies.cut(PageWrite(np.arange(4), np.arange(4), layers))]


def test_every_rank_holds_the_latent_and_one_of_them_sends_each_page() -> None:
    dst, pages = two_regions(), np.arange(8)
    sent = []
    for rank in range(2):
        copies = plan(two_regions(rank=rank, num_ranks=2), dst)
        assert copies is not None
        sent.append(copies.cut(PageWrite(pages, pages))[1].dst.tolist())
    assert sent == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [parts.heads for parts in parts_of(two_regions(num_ranks=2), dst)] == [(2, 2), (1,)]


def test_a_device_wants_whole_lines_of_every_region() -> None:
    with pytest.raises(ConfigError, match="multiple of 128 bytes, not 192"):
        Device("emulated").validate(two_regions(2))


@pytest.mark.parametrize("reach", ["window", "slot"])
def test_pages_hold_regions_of_all_tokens_so_far(reach: Any) -> None:
    layout = two_regions()
    layout.validate()
    with pytest.raises(ConfigError, match=f"reach '{reach}' is not held by pages yet"):
        replace(layout, regions=(layout.regions[0], replace(layout.regions[1], reach=reach))).validate()


def test_a_shard_is_one_region_of_one_rank() -> None:
    kv, latent = Shard.all_of(two_regions(rank=1, num_ranks=2))
    assert (kv.first_head, kv.end_head, kv.num_copies) == (2, 4, 1)
    assert (latent.first_head, latent.end_head, latent.num_copies, latent.copy) == (0, 1, 2, 1)


@pytest.mark.parametrize("kind", ["inproc", "shm", "nixl-shm"])
def test_a_write_of_layers_that_no_region_has_moves_nothing_but_its_note(
    make_inproc_end: Make, make_child_end: Make, link: Link, kind: str, has_nixl: None
) -> None:
    network, layout = InprocNetwork(), replace(two_regions(), regions=(Region((0, 3), 1, 1, 8, "float32", 1),))

    def make(instance: int) -> Any:
        if kind == "inproc":
            return make_inproc_end(network, instance, layout)
        return make_child_end(kind, instance, layout)

    one, other = make(1), make(2)
    link(one, other)
    op = one.write(2, [1], [2], b"done", layers=(1, 3), with_digest=True)
    assert one.wait_done(op) == OpDone(op, None, 0)
    assert other.wait_note() == NoteReceived(1, b"done", 0)
