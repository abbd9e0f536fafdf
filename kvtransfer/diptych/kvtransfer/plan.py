"""How pages get from the pool of one rank into the pool of another with another layout: what is sent, where it lands.

Rule: a plan goes region by region. On the wire a region of a target page is one run of bytes for each rank that sends a
part of it. The sender packs what it has of the region, cast to the target's type: tokens of the target's page, heads
that both ranks have. Parts land one after the other in the target's region itself, in order of their heads; the target
unpacks it in place once it was verified. Regions with equal pages and heads move as they are, and neighbours among them
as one run.

Where ranks have some of the layers each, as the stages of a pipeline do, a plan is about the layers that both pools
have: they are neighbours in both, and so one run of bytes, or one run of parts, as a region of their own would be.

Pages that hold a state, and no tokens, become pages of another size or of other ranks by runs of bytes (`state_plan`).

Ranks that outnumber the heads of a region hold copies of them. Each copy at the target has its own senders among the
copies at the source; several take the target's pages in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Final

import numpy as np

from diptych.kernels.page_pack import HEAD_STEP, U8, PagePack, unpack_page
from diptych.kvtransfer.errors import LayoutMismatch, TransferError
from diptych.kvtransfer.layout import LINE_NBYTES, PoolLayout, Region, StateStage
from diptych.kvtransfer.runs import ByteWindow, Copy, Runs, cut
from diptych.kvtransfer.state_plan import StateRun, state_runs
from diptych.kvtransfer.transport import PageWrite

MESSAGE_NBYTES: Final = 480 << 10  # that a message holds of pages; it has whole rows only. As in limits.h, and ...
PACK_ENTRIES: Final = 16384  # ... as in device.h: images that a device packs in one go, and the pages they are made of

_WORD_NBYTES: Final = 8  # what digests are made of: a word belongs to one part


@dataclass(frozen=True, slots=True)
class Shard:
    """What the pool of one rank holds of one region of a model's KV."""

    layout: PoolLayout
    region: Region
    offset: int  # of the region in a page, bytes

    @staticmethod
    def all_of(layout: PoolLayout) -> tuple[Shard, ...]:
        """Return one for each region."""
        pairs = zip(layout.regions, layout.offsets, strict=True)
        return tuple(Shard(layout, region, offset) for region, offset in pairs)

    def of_layers(self, layers: tuple[int, ...]) -> Shard:
        """Return the same of some layers of the region, which follow each other there."""
        first = self.region.layers.index(layers[0])
        offset = self.offset + first * self.region.layer_nbytes(self.page_size)
        return replace(self, region=replace(self.region, layers=layers, total_layers=()), offset=offset)

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def first_head(self) -> int:
        """The first of the model's heads here. Ranks that outnumber them share: neighbours hold the same one."""
        return self.layout.rank * self.region.total_heads // self.layout.num_ranks

    @property
    def end_head(self) -> int:
        return self.first_head + self.region.num_heads

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same heads."""
        return self.region.num_heads * self.layout.num_ranks // self.region.total_heads

    @property
    def copy(self) -> int:
        """Which of them this is."""
        return self.layout.rank % self.num_copies

    @property
    def part_nbytes(self) -> int:
        """Bytes of one head of the region in a page."""
        return len(self.region.layers) * self.region.head_nbytes(self.page_size)

    def equals(self, other: Shard) -> bool:
        """Whether the region lies in the pages of both as the same bytes."""
        return (self.region, self.page_size, self.first_head) == (other.region, other.page_size, other.first_head)

    def validate(self) -> None:
        """Raise `LayoutMismatch` unless the ranks share the heads evenly."""
        rank, ranks = self.layout.rank, max(self.layout.num_ranks, 1)
        heads, total = self.region.num_heads, max(self.region.total_heads, 1)
        divides = total % ranks == 0 and heads == total // ranks
        shares = ranks % total == 0 and heads == 1
        if not 0 <= rank < ranks or not (divides or shares):
            raise LayoutMismatch(f"rank {rank} of {ranks} can't hold {heads} of {total} KV heads")


@dataclass(frozen=True, slots=True)
class Copies:
    """What one rank writes into the pages of another, region by region."""

    regions: tuple[Copy, ...]
    num_layers: int  # of the model
    state: tuple[StateRun, ...] = ()  # of pages that hold a state, not tokens

    @property
    def all(self) -> tuple[Copy, ...]:
        return (*self.regions, *(run.copy for run in self.state))

    def cut(self, write: PageWrite) -> tuple[Runs, ...]:
        """Return what this rank sends of a write. Raises `TransferError` for one that is not of these pages."""
        src, dst = (np.ascontiguousarray(pages, np.int64) for pages in (write.src, write.dst))
        if write.as_bytes:
            return tuple(run.cut(src, dst) for run in self.state)
        return tuple(cut(copy, window, src, dst, write.skip_tokens) for copy, window in self._windows(write.layers))

    def _windows(self, layers: tuple[int, int] | None) -> Iterator[tuple[Copy, ByteWindow]]:
        """What of each region moves: neighbours that move as they are, in the same turns, are one."""
        first, end = layers or (0, self.num_layers)
        if not 0 <= first < end <= self.num_layers:
            raise TransferError(f"layers [{first}, {end}) are not in pages of {self.num_layers} layers")
        found: list[tuple[Copy, ByteWindow]] = []
        for copy in self.regions:
            window = copy.window(first, end)
            if found and (merged := _merged(*found[-1], copy, window)):
                found[-1] = copy, merged
            elif window.nbytes:
                found.append((copy, window))
        return iter(found)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that land in a region of our pages."""

    offset: int  # of the region in a page, bytes
    num_rows: int  # a row is a token in one plane of one layer
    head_nbytes: int  # of a token in a plane
    heads: tuple[int, ...]  # of each part, in order; one: nothing to unpack

    @property
    def nbytes(self) -> int:
        """The bytes of the region in a page."""
        return self.num_rows * sum(self.heads) * self.head_nbytes

    def unpack(self, page: U8) -> None:
        """Put the heads of each token side by side, in place; `page` is the bytes of a page."""
        unpack_page(page[self.offset : self.offset + self.nbytes], self.heads, self.num_rows, self.head_nbytes)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How pages go from a pool to that of a peer, and what comes from there."""

    copies: Copies | None  # None: we send it nothing
    parts: tuple[Parts, ...]  # of the regions that have to be unpacked

    @property
    def packs(self) -> tuple[PagePack, ...]:
        """Return how images of tokens are made for the peer: none where pages move as they are."""
        copies = self.copies.regions if self.copies is not None else ()
        return tuple(copy.pack for copy in copies if copy.pack is not None)

    @staticmethod
    def between(own: PoolLayout, peer: PoolLayout) -> Conversion:
        """Raises `LayoutMismatch`."""
        return Conversion(plan(own, peer), tuple(parts for parts in parts_of(peer, own) if len(parts.heads) > 1))


def plan(src: PoolLayout, dst: PoolLayout) -> Copies | None:
    """Return how the rank of `src` writes to that of `dst`; None: it sends it nothing. Raises `LayoutMismatch`."""
    check(src, dst)
    copies = tuple(copy for one, other in _common(src, dst) if (copy := _copy(one, other)))
    for copy in copies:
        _check_row(copy)
    states = state_runs(src, dst)
    return Copies(copies, dst.num_layers, states) if copies or states else None


def parts_of(src: PoolLayout, dst: PoolLayout) -> tuple[Parts, ...]:
    """Return the parts that land in each region of a page of `dst`, in layers that `src` has, too.

    `src` may be that of any of the source's ranks with these layers.
    """
    return tuple(_parts(*pair) for pair in _common(src, dst))


def lands_in_parts(src: Sequence[PoolLayout], dst: PoolLayout) -> bool:
    """Whether pages of any rank of the target have to be put together; `dst` is the layout of one of them.

    Not of each, where neither side's number of ranks divides the other's: of 6 heads that go from 2 ranks to 3, only
    the middle rank's come from two.
    """
    stages, ranks = {replace(one, rank=0) for one in src}, range(dst.num_ranks)
    pairs = ((stage, replace(dst, rank=rank)) for stage, rank in product(stages, ranks))
    return any(len(parts.heads) > 1 for pair in pairs for parts in parts_of(*pair))


def linked_ranks(one: PoolLayout, others: Sequence[PoolLayout]) -> tuple[int, ...]:
    """Return the ranks of the other side to which the rank of `one` writes, or which write to it."""
    return tuple(rank for rank, other in enumerate(others) if plan(one, other) or plan(other, one))


def check(src: PoolLayout, dst: PoolLayout) -> None:
    """Raise `LayoutMismatch` unless pages of the one can become pages of the other."""
    for shard in (*Shard.all_of(src), *Shard.all_of(dst)):
        shard.validate()
    if _model(src) != _model(dst):
        raise LayoutMismatch(
            f"KV of another model: [layers, planes, KV heads, head size] {_words(src)} and {_words(dst)}"
        )
    if src.state_nbytes != dst.state_nbytes:
        raise LayoutMismatch(f"states of another model: {src.state_nbytes} and {dst.state_nbytes} bytes")
    if src.state_stage and dst.state_stage and _cells(src.state_stage) != _cells(dst.state_stage):
        raise LayoutMismatch(f"states of another model: {src.state_stage} and {dst.state_stage}")
    stage = src.state_stage or dst.state_stage
    if stage is not None and any(stage.num_units % each.num_ranks for each in (src, dst)):
        raise LayoutMismatch(f"{src.num_ranks} and {dst.num_ranks} ranks can't share {stage.num_units} parts of states")
    for one, other in _common(src, dst):
        if not one.equals(other):
            _check_words(one)
            _check_words(other)


def _cells(stage: StateStage) -> tuple[int, int]:
    return stage.num_units, stage.total_layers


def check_on_device(conversion: Conversion, own: PoolLayout) -> None:
    """Raise `LayoutMismatch` unless a device with a pool of `own` can convert so: whole lines, heads of whole steps."""
    copies = conversion.copies.all if conversion.copies is not None else ()
    packs = [copy.pack for copy in copies if copy.pack is not None]
    if not conversion.parts and not packs:
        return
    _check_packs(packs, own.page_shape.head_dim)
    sent = (nbytes for copy in copies for nbytes in (copy.dst, copy.layer_nbytes))
    landed = (parts.num_rows * parts.head_nbytes for parts in conversion.parts)
    if any(nbytes % LINE_NBYTES for nbytes in (*sent, *landed)):
        raise LayoutMismatch(_not_on_device(f"parts of pages that are no multiples of {LINE_NBYTES} bytes"))


def _check_packs(packs: Sequence[PagePack], head_dim: int) -> None:
    """Raise `LayoutMismatch` for what kernels, compiled for heads of multiples of `head_dim`, can't pack."""
    if head_dim % HEAD_STEP:
        raise LayoutMismatch(_not_on_device(f"heads whose sizes are no multiples of {HEAD_STEP}"))
    if any(pack.head_dim % (head_dim & -head_dim) for pack in packs):  # what they move at a time
        raise LayoutMismatch(_not_on_device("pages whose sizes have so little in common"))
    if any(pack.dst_page_size // pack.src_page_size + 3 > PACK_ENTRIES for pack in packs):  # wherever the first begins
        raise LayoutMismatch(_not_on_device("such small pages into such large ones"))


def _not_on_device(what: str) -> str:
    remedy = "give both workers the same --tp, --page-size and --kv-cache-dtype, or larger pages"
    return f"a device can't convert {what}: {remedy}"


def _check_words(shard: Shard) -> None:
    region = shard.region
    if region.head_nbytes(shard.page_size) % _WORD_NBYTES:
        raise LayoutMismatch(
            f"pages of {shard.page_size} tokens, {region.head_dim} {region.dtype} a head, can't be converted: "
            f"a layer of a head must be a multiple of {_WORD_NBYTES} bytes; use larger pages"
        )


def _check_row(copy: Copy) -> None:
    if copy.pack is not None and math.lcm(copy.pack.row_nbytes, LINE_NBYTES) > MESSAGE_NBYTES:
        raise LayoutMismatch(
            f"a token of {copy.pack.row_nbytes} bytes in one layer can't be converted: a message holds "
            f"{MESSAGE_NBYTES}; give both workers the same --tp, --page-size and --kv-cache-dtype, or a larger --tp"
        )


def _copy(src: Shard, dst: Shard) -> Copy | None:
    """How one region goes from a rank to another; None: it does not."""
    first, end = max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)
    senders = _senders(src.num_copies, dst.num_copies, dst.copy)
    if first >= end or src.copy not in senders:
        return None
    turn, num_turns = senders.index(src.copy), len(senders)
    if src.equals(dst):
        layer_nbytes = src.region.layer_nbytes(src.page_size)
        return Copy(None, src.region.layers, src.offset, dst.offset, layer_nbytes, turn, num_turns)
    pack = _pack(src, dst, first, end)
    at = dst.offset + (first - dst.first_head) * dst.part_nbytes
    return Copy(pack, src.region.layers, 0, at, pack.layer_nbytes, turn, num_turns)


def _common(src: PoolLayout, dst: PoolLayout) -> Iterator[tuple[Shard, Shard]]:
    """Yield each region of both, as far as both have its layers."""
    for one, other in zip(Shard.all_of(src), Shard.all_of(dst), strict=True):
        theirs = frozenset(other.region.layers)
        if layers := tuple(layer for layer in one.region.layers if layer in theirs):
            yield one.of_layers(layers), other.of_layers(layers)


def _pack(src: Shard, dst: Shard, first_head: int, end_head: int) -> PagePack:
    region = src.region
    return PagePack(
        num_layers=len(region.layers),
        head_dim=region.head_dim,
        src_page_size=src.page_size,
        src_num_heads=region.num_heads,
        src_dtype=region.dtype,
        first_head=first_head - src.first_head,
        num_heads=end_head - first_head,
        dst_page_size=dst.page_size,
        dst_dtype=dst.region.dtype,
        num_planes=region.num_planes,
        src_offset=src.offset,
        src_page_nbytes=src.layout.page_nbytes,
    )


def _parts(src: Shard, dst: Shard) -> Parts:
    width, region = src.region.num_heads, dst.region
    cuts = [head for head in range(dst.first_head + 1, dst.end_head) if head % width == 0]
    edges = [dst.first_head, *cuts, dst.end_head]
    heads = tuple(end - start for start, end in pairwise(edges))
    head_nbytes = region.head_nbytes(1) // region.num_planes
    return Parts(dst.offset, len(region.layers) * region.num_planes * dst.page_size, head_nbytes, heads)


def _merged(former: Copy, before: ByteWindow, copy: Copy, window: ByteWindow) -> ByteWindow | None:
    """The two windows as one, if they are neighbours on both sides and go the same way."""
    ends = before.src + before.nbytes, before.dst + before.nbytes
    if former.pack or copy.pack or ends != (window.src, window.dst):
        return None
    if (former.turn, former.num_turns) != (copy.turn, copy.num_turns):
        return None
    return replace(before, nbytes=before.nbytes + window.nbytes)


def _senders(num_src: int, num_dst: int, copy: int) -> list[int]:
    """The copies at the source that send to one of the copies at the target: each about as much as the others."""
    own = [sender for sender in range(num_src) if sender * num_dst // num_src == copy]
    return own or [copy * num_src // num_dst]


def _model(layout: PoolLayout) -> tuple[Region, ...]:
    """The regions as every pool of a model has them."""
    return tuple(
        replace(region, num_heads=region.total_heads, dtype="", layers=region.model_layers, total_layers=())
        for region in layout.regions
    )


def _words(layout: PoolLayout) -> str:
    shapes = [[len(r.model_layers), r.num_planes, r.total_heads, r.head_dim] for r in layout.regions]
    return ", ".join(map(str, shapes))
