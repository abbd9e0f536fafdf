"""How the state of a request gets from the pages of one rank into those of another, whatever pages, ranks and stages.

A state is `[num_units, num_layers, cell_nbytes]`. Each rank of a side has an equal part of the units, each stage some
neighbouring layers, in pages of its own that begin with it. So what two ranks both have is one run of bytes where they
have the same layers, and otherwise one of each unit. A run is cut where pages of the target end: the first and the last
of them may be filled by two ranks, the pages between by one. Who has the end of a rank's part fills the rest of its
last page, and those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.layout import PoolLayout, StateStage
from diptych.kvtransfer.runs import I64, NO_TOKENS, Copy, Runs

_MOST_NBYTES: Final = 32 << 10  # of a row: a message is full of such rows


@dataclass(frozen=True, slots=True)
class StateRun:
    """Neighbouring pages of a state that one rank fills alike."""

    copy: Copy
    first_row: int  # of our pages, where it begins; rows are those of `copy.pack`
    pages: range  # of the target's
    num_src: int  # pages that ours takes
    num_dst: int  # and the target's

    def cut(self, src: I64, dst: I64) -> Runs:
        """Return what is sent. Raises `TransferError` for pages that are not those of a state."""
        if (len(src), len(dst)) != (self.num_src, self.num_dst):
            wanted = f"{self.num_src} source pages and {self.num_dst} target pages"
            raise TransferError(f"a state takes {wanted}, not {len(src)} and {len(dst)}")
        window, targets = self.copy.window(0, 1), dst[self.pages.start : self.pages.stop]
        if self.copy.pack is None:
            return Runs(src, NO_TOKENS, targets, window)
        rows = self.first_row + np.arange(len(targets)) * self.copy.pack.dst_page_size
        return Runs(src, rows, targets, window, self.copy.pack)


class _Bytes(NamedTuple):
    """A run of bytes that both sides have: where it begins in the part of each."""

    src: int
    dst: int
    nbytes: int


def state_runs(src: PoolLayout, dst: PoolLayout) -> tuple[StateRun, ...]:
    """Return what the rank of `src` sends to that of `dst` of a state: none where it has nothing of that rank's."""
    num_src, num_dst = src.pages_per_state, dst.pages_per_state
    both = list(_common(src, dst))
    if both == [_Bytes(0, 0, src.share_nbytes)] and _are_alike(src, dst):
        whole = Copy(None, (0,), 0, 0, dst.page_nbytes)
        return (StateRun(whole, 0, range(num_dst), num_src, num_dst),)
    row = _row_nbytes(src, dst)
    return tuple(
        StateRun(_copy(src, row, offset, nbytes), (each.src + at - each.dst) // row, pages, num_src, num_dst)
        for each in both
        for at, offset, nbytes, pages in _spans(each.dst, _stop(each, dst), dst.page_nbytes)
    )


def _are_alike(src: PoolLayout, dst: PoolLayout) -> bool:
    """Whether pages of a state are the same of two ranks that have the same of it."""
    ours, theirs = ((each.page_nbytes, each.share_nbytes, each.pages_per_state) for each in (src, dst))
    return ours == theirs


def _common(src: PoolLayout, dst: PoolLayout) -> Iterator[_Bytes]:
    """Yield what both have."""
    stage = src.state_stage or dst.state_stage
    if stage is None:
        first = max(src.rank * src.share_nbytes, dst.rank * dst.share_nbytes)
        end = min((src.rank + 1) * src.share_nbytes, (dst.rank + 1) * dst.share_nbytes)
        if first < end:
            yield _Bytes(first - src.rank * src.share_nbytes, first - dst.rank * dst.share_nbytes, end - first)
        return
    cell = src.state_nbytes // (stage.num_units * stage.total_layers)
    ours, theirs = _units(src, stage), _units(dst, stage)
    units = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    of_src, of_dst = (each.state_stage.layers if each.state_stage else range(stage.total_layers) for each in (src, dst))
    layers = range(max(of_src.start, of_dst.start), min(of_src.stop, of_dst.stop))
    if not units or not layers:
        return
    at_once = len(units) if of_src == of_dst else 1  # units, between which nothing lies that only one has
    for unit in units[::at_once]:
        from_cell = (unit - ours.start) * len(of_src) + layers.start - of_src.start
        to_cell = (unit - theirs.start) * len(of_dst) + layers.start - of_dst.start
        yield _Bytes(from_cell * cell, to_cell * cell, at_once * len(layers) * cell)


def _units(layout: PoolLayout, stage: StateStage) -> range:
    """Return those of a rank; `stage`: of any pool of the pair."""
    share = stage.num_units // layout.num_ranks
    return range(layout.rank * share, (layout.rank + 1) * share)


def _stop(both: _Bytes, dst: PoolLayout) -> int:
    """Return where a run ends in the target's part: behind its last page where its part ends."""
    end = both.dst + both.nbytes
    return dst.pages_per_state * dst.page_nbytes if end == dst.share_nbytes else end


def _spans(begin: int, stop: int, page: int) -> Iterator[tuple[int, int, int, range]]:
    """Cut bytes where pages are cut: where it begins, also in its page, the bytes in each page, and the pages."""
    whole = -(-begin // page) * page, stop // page * page
    edges = [begin, *whole, stop] if whole[0] <= whole[1] else [begin, stop]
    for at, end in pairwise(edges):
        if at < end:
            yield at, at % page, min(page, end - at), range(at // page, -(-end // page))


def _copy(src: PoolLayout, row: int, offset: int, nbytes: int) -> Copy:
    dtype = src.regions[0].dtype
    pack = PagePack(
        num_layers=1,
        head_dim=row // DTYPE_NBYTES[dtype],
        src_page_size=src.page_nbytes // row,
        src_num_heads=1,
        src_dtype=dtype,
        first_head=0,
        num_heads=1,
        dst_page_size=nbytes // row,
        dst_dtype=dtype,
        num_planes=1,
    )
    return Copy(pack, (0,), 0, offset, nbytes)


def _row_nbytes(src: PoolLayout, dst: PoolLayout) -> int:
    """Return the largest power of two of which pages and parts of both sides have a whole number.

    So it is whole lines, and whole steps of a device's kernels, wherever the pages are. Where both sides have as many
    ranks nothing is cut but by pages, and between stages by cells.
    """
    shares = () if src.num_ranks == dst.num_ranks else (src.share_nbytes, dst.share_nbytes)
    stage = src.state_stage or dst.state_stage
    cells = () if stage is None else (src.state_nbytes // (stage.num_units * stage.total_layers),)
    common = math.gcd(src.page_nbytes, dst.page_nbytes, *shares, *cells)
    return min(common & -common, _MOST_NBYTES)
