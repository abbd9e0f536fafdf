"""The pages of a side as each of its ranks holds them, and how they get to the ranks of another side.

A rank has some of `LAYERS` heads of each token, and an equal run of a state. Between sides that are alike pages are
copied; else what moves, and how it lands, is what the plans of the transfer engine say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from page_landing import land
from recurrent_runner import RecurrentRunner

from diptych.common.arrays import I32, I64, U64
from diptych.kernels.page_pack import U8
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.kvtransfer.plan import Copies, Parts, parts_of, plan
from diptych.kvtransfer.transport import PageIndices, PageWrite
from simulation.layered_runner import LayeredRunner
from simulation.requests import CELL_NBYTES, LAYERS, VOCAB


class Shape(NamedTuple):
    """How the pages of a side lie."""

    num_pages: int
    page_size: int
    num_ranks: int
    num_state_cells: int  # on all ranks

    @property
    def pages_per_state(self) -> int:
        return -(-self.num_state_cells // (LAYERS * self.page_size))


@lru_cache
def layouts(shape: Shape) -> tuple[PoolLayout, ...]:
    """Return those of all ranks. A cell is two numbers, which are never cast."""
    region = Region((0,), 1, LAYERS // shape.num_ranks, 2, "float32", LAYERS)
    nbytes = shape.num_state_cells * CELL_NBYTES
    ranks = range(shape.num_ranks)
    return tuple(PoolLayout(shape.num_pages, shape.page_size, (region,), rank, len(ranks), nbytes) for rank in ranks)


@lru_cache
def plans(src: Shape, dst: Shape) -> tuple[tuple[Copies | None, ...], ...]:
    """Return what each rank sends to each other one."""
    return tuple(tuple(plan(one, other) for other in layouts(dst)) for one in layouts(src))


@lru_cache
def all_parts(src: Shape, dst: Shape) -> tuple[tuple[Parts, ...], ...]:
    """Return what has to be put together in a page of each rank."""
    found = (parts_of(layouts(src)[0], each) for each in layouts(dst))
    return tuple(tuple(parts for parts in regions if len(parts.heads) > 1) for regions in found)


@dataclass(slots=True, eq=False)
class Pools:
    shape: Shape
    raw: U64  # [num_ranks, num_pages, page_size, heads of a rank]

    @staticmethod
    def new(shape: Shape) -> Pools:
        assert shape.num_ranks in (1, LAYERS)
        heads = LAYERS // shape.num_ranks
        return Pools(shape, np.zeros((shape.num_ranks, shape.num_pages, shape.page_size, heads), np.uint64))

    @property
    def kv(self) -> U64:
        """All heads of all pages, `[num_pages, LAYERS, page_size]`: a view."""
        one = self.shape.num_ranks == 1
        return self.raw[0].transpose(0, 2, 1) if one else self.raw[..., 0].transpose(1, 0, 2)

    def rank(self, number: int) -> U8:
        """Return the bytes of a rank's pages, `[num_pages, page_nbytes]`: a view."""
        pages: U8 = self.raw[number].reshape(self.shape.num_pages, -1).view(np.uint8)
        return pages

    def digest(self, pages: PageIndices) -> int:
        found = (self.rank(number) for number in range(self.shape.num_ranks))
        return add_digests(
            *(digest_bytes(rank[page].tobytes(), page * rank.shape[1]) for rank in found for page in pages.tolist())
        )

    def write(self, rank: int, other: Pools, pages: PageWrite) -> int:
        """Let a rank of ours write what it has of a write into the pages of all others; return its digest."""
        digest = 0
        for number, copies in enumerate(plans(self.shape, other.shape)[rank]):
            target = other.rank(number)
            for runs in copies.cut(pages) if copies is not None else ():
                land(self.rank(rank), target, runs)
                window = slice(runs.window.dst, runs.window.dst + runs.window.nbytes)
                for page in runs.dst.tolist():
                    at = page * target.shape[1] + window.start
                    digest = add_digests(digest, digest_bytes(target[page, window].tobytes(), at))
        return digest

    def put_together(self, writer: Shape, pages: PageIndices) -> None:
        """Put the parts of pages that ranks of `writer` wrote together."""
        for number, regions in enumerate(all_parts(writer, self.shape)):
            rank = self.rank(number)
            for parts in regions:
                for page in pages.tolist():
                    parts.unpack(rank[page])


class StatesOfRanks(RecurrentRunner):
    """Keeps states in pages as ranks do: each has a run of it, in the order of ranks."""

    def __init__(self, plain: LayeredRunner, pools: Pools, states: U64) -> None:
        super().__init__(plain, pools.kv, states, VOCAB)
        self._pools = pools

    def _found(self, pages: I32) -> U64:
        share = self._states.shape[1] // self._pools.shape.num_ranks
        runs = [rank[pages].reshape(len(pages), -1)[:, :share] for rank in self._pools.raw]
        return np.concatenate(runs, axis=1)

    def _keep(self, pages: I32, slots: I64) -> None:
        for rank, share in zip(
            self._pools.raw, np.split(self._states[slots], self._pools.shape.num_ranks, axis=1), strict=True
        ):
            cells = np.zeros((len(slots), pages.shape[1] * rank[0].size), np.uint64)
            cells[:, : share.shape[1]] = share
            rank[pages] = cells.reshape(*pages.shape, *rank.shape[1:])
