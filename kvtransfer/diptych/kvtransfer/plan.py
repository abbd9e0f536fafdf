"""How pages get from the pool of one rank into the pool of another with another layout: what is sent, where it lands.

Rule: on the wire a target page is one run of bytes for each rank that sends a part of it. The sender packs what it has
of the page, cast to the target's type: tokens of the target's page, heads that both ranks have. Parts land one after
the other in the target page itself, in order of their heads; the target unpacks it in place once it was verified.
Pages of equal layouts and heads move as they are.

Ranks that outnumber the KV heads hold copies of them. Each copy at the target has its own senders among the copies at
the source; several take the target's pages in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.errors import LayoutMismatch, TransferError
from diptych.kvtransfer.layout import DTYPE_NBYTES, PoolLayout
from diptych.kvtransfer.transport import PageWrite

I64 = npt.NDArray[np.int64]

NO_TOKENS: Final = np.zeros(0, np.int64)

_WORD_NBYTES: Final = 8  # what digests are made of: a word belongs to one part


@dataclass(frozen=True, slots=True)
class Shard:
    """What the pool of one rank holds of a model's KV."""

    layout: PoolLayout
    total_kv_heads: int  # of the model
    rank: int = 0
    num_ranks: int = 1

    @staticmethod
    def of(layout: PoolLayout) -> Shard:
        share = layout.share
        if share is None:
            return Shard(layout, layout.num_kv_heads)
        return Shard(layout, share.total_kv_heads, share.rank, share.num_ranks)

    @property
    def first_head(self) -> int:
        """Of the model's heads. Ranks that outnumber them share: neighbours hold the same one."""
        return self.rank * self.total_kv_heads // self.num_ranks

    @property
    def end_head(self) -> int:
        return self.first_head + self.layout.num_kv_heads

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same heads."""
        return self.layout.num_kv_heads * self.num_ranks // self.total_kv_heads

    @property
    def copy(self) -> int:
        """Which of them this is."""
        return self.rank % self.num_copies

    def validate(self) -> None:
        """Raise `LayoutMismatch` unless its ranks share the heads evenly."""
        heads, ranks, total = self.layout.num_kv_heads, max(self.num_ranks, 1), max(self.total_kv_heads, 1)
        divides = total % ranks == 0 and heads == total // ranks
        shares = ranks % total == 0 and heads == 1
        if not 0 <= self.rank < ranks or not (divides or shares):
            raise LayoutMismatch(f"rank {self.rank} of {ranks} can't hold {heads} of {total} KV heads")


@dataclass(frozen=True, slots=True)
class Copies:
    """What one rank writes into the pages of another."""

    pack: PagePack | None  # how an image is made; None: pages move as they are
    num_layers: int
    offset: int  # of the image in the target page, bytes
    nbytes: int  # of the image
    turn: int = 0  # this rank sends target page p where p % num_turns == turn
    num_turns: int = 1

    def cut(self, write: PageWrite) -> Runs:
        """Return what this rank sends of a write. Raises `TransferError` for one that is not of these pages."""
        src, dst = (np.ascontiguousarray(pages, np.int64) for pages in (write.src, write.dst))
        window = self._window(write.layers or (0, self.num_layers))
        if self.pack is None:
            if len(src) != len(dst) or write.skip_tokens:
                raise TransferError(f"{len(src)} source pages but {len(dst)} target pages, of one size")
            if self.num_turns > 1:
                src, dst = (pages[dst % self.num_turns == self.turn] for pages in (src, dst))
            return Runs(src, NO_TOKENS, dst, window)
        places = np.flatnonzero(dst % self.num_turns == self.turn)
        return Runs(src, write.skip_tokens + places * self.pack.dst_page_size, dst[places], window)

    def _window(self, layers: tuple[int, int]) -> ByteWindow:
        first, end = layers
        if not 0 <= first < end <= self.num_layers:
            raise TransferError(f"layers [{first}, {end}) are not in pages of {self.num_layers} layers")
        layer_nbytes = self.nbytes // self.num_layers
        begin = first * layer_nbytes
        return ByteWindow(begin, self.offset + begin, (end - first) * layer_nbytes)


@dataclass(frozen=True, slots=True)
class ByteWindow:
    """The bytes that move of each page: at `src` of a page of ours, or of an image, and at `dst` of the peer's page."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of bytes of one write, one a target page."""

    src: I64  # whole pages: `src[i]` goes to `dst[i]`; packed ones: all that the tokens are in
    first_tokens: I64  # of each image, among those of `src`; none for whole pages
    dst: I64
    window: ByteWindow


@dataclass(frozen=True, slots=True)
class Conversion:
    """How pages go from a pool to that of a peer, and what comes from there."""

    copies: Copies | None  # None: we send it nothing
    part_heads: tuple[int, ...]  # of the parts that land in a page of ours; one: nothing to unpack

    @property
    def is_trivial(self) -> bool:
        """Whether pages move as they are."""
        return len(self.part_heads) == 1 and (self.copies is None or self.copies.pack is None)

    @staticmethod
    def between(own: PoolLayout, peer: PoolLayout) -> Conversion:
        """Raises `LayoutMismatch`."""
        one, other = Shard.of(own), Shard.of(peer)
        return Conversion(plan(one, other), part_heads(other, one))


def plan(src: Shard, dst: Shard) -> Copies | None:
    """Return how rank `src` writes to rank `dst`; None when it sends it nothing. Raises `LayoutMismatch`."""
    check(src, dst)
    first, end = max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)
    senders = _senders(src.num_copies, dst.num_copies, dst.copy)
    if first >= end or src.copy not in senders:
        return None
    turn, num_turns = senders.index(src.copy), len(senders)
    if _page(src.layout) == _page(dst.layout) and src.first_head == dst.first_head:
        return Copies(None, dst.layout.num_layers, 0, dst.layout.page_nbytes, turn, num_turns)
    pack = PagePack(
        num_layers=src.layout.num_layers,
        head_dim=src.layout.head_dim,
        src_page_size=src.layout.page_size,
        src_num_heads=src.layout.num_kv_heads,
        src_dtype=src.layout.dtype,
        first_head=first - src.first_head,
        num_heads=end - first,
        dst_page_size=dst.layout.page_size,
        dst_dtype=dst.layout.dtype,
    )
    offset = (first - dst.first_head) * _head_nbytes(dst.layout)
    return Copies(pack, dst.layout.num_layers, offset, pack.image_nbytes, turn, num_turns)


def part_heads(src: Shard, dst: Shard) -> tuple[int, ...]:
    """Return how many heads each part has that lands in a page of `dst`, in order. One part: nothing to unpack.

    `src` may be any of the source's ranks.
    """
    width = src.layout.num_kv_heads
    cuts = [head for head in range(dst.first_head + 1, dst.end_head) if head % width == 0]
    edges = [dst.first_head, *cuts, dst.end_head]
    return tuple(end - start for start, end in pairwise(edges))


def linked_ranks(one: Shard, others: Sequence[Shard]) -> tuple[int, ...]:
    """Return the ranks of the other side to which rank `one` writes, or which write to it."""
    return tuple(other.rank for other in others if plan(one, other) or plan(other, one))


def check(src: Shard, dst: Shard) -> None:
    """Raise `LayoutMismatch` unless pages of the one can become pages of the other."""
    src.validate()
    dst.validate()
    if _model(src) != _model(dst):
        raise LayoutMismatch(f"KV of another model: [layers, KV heads, head size] {_model(src)} and {_model(dst)}")
    if _page(src.layout) != _page(dst.layout) or src.first_head != dst.first_head:
        for layout in (src.layout, dst.layout):
            if _head_nbytes(layout) // layout.num_layers % _WORD_NBYTES:
                raise LayoutMismatch(
                    f"pages of {layout.page_size} tokens, {layout.head_dim} {layout.dtype} a head, can't be converted: "
                    f"a layer of a head must be a multiple of {_WORD_NBYTES} bytes; use larger pages"
                )


def _senders(num_src: int, num_dst: int, copy: int) -> list[int]:
    """The copies at the source that send to one of the copies at the target: each about as much as the others."""
    own = [sender for sender in range(num_src) if sender * num_dst // num_src == copy]
    return own or [copy * num_src // num_dst]


def _page(layout: PoolLayout) -> tuple[tuple[int, ...], str]:
    return layout.shape[1:], layout.dtype


def _model(shard: Shard) -> list[int]:
    return [shard.layout.num_layers, shard.total_kv_heads, shard.layout.head_dim]


def _head_nbytes(layout: PoolLayout) -> int:
    """Bytes of one head in a page."""
    return layout.num_layers * 2 * layout.page_size * layout.head_dim * DTYPE_NBYTES[layout.dtype]
