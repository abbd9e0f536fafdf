"""How the state of a request gets from the pages of one rank into those of another, whatever pages and ranks: as bytes.

A state is one run of bytes, of which each rank of a side has an equal part, in pages of its own that begin with it. So
what two ranks both have is a run, too. It is cut where pages of the target end: the first and the last of them may be
filled by two ranks, the pages between by one. Who has the end of a rank's part fills the rest of its last page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.layout import PoolLayout
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


def state_runs(src: PoolLayout, dst: PoolLayout) -> tuple[StateRun, ...]:
    """Return what the rank of `src` sends to that of `dst` of a state: none where it has nothing of that rank's."""
    first = max(src.rank * src.share_nbytes, dst.rank * dst.share_nbytes)
    end = min((src.rank + 1) * src.share_nbytes, (dst.rank + 1) * dst.share_nbytes)
    if first >= end:
        return ()
    num_src, num_dst = (-(-side.share_nbytes // side.page_nbytes) for side in (src, dst))
    if (src.page_nbytes, src.share_nbytes) == (dst.page_nbytes, dst.share_nbytes):
        whole = Copy(None, (0,), 0, 0, dst.page_nbytes)
        return (StateRun(whole, 0, range(num_dst), num_src, num_dst),)
    begin = first - dst.rank * dst.share_nbytes
    stop = end - dst.rank * dst.share_nbytes
    if stop == dst.share_nbytes:
        stop = num_dst * dst.page_nbytes
    row, skipped = _row_nbytes(src, dst), first - src.rank * src.share_nbytes
    return tuple(
        StateRun(_copy(src, row, offset, nbytes), (skipped + at - begin) // row, pages, num_src, num_dst)
        for at, offset, nbytes, pages in _spans(begin, stop, dst.page_nbytes)
    )


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
    ranks nothing is cut but by pages.
    """
    shares = () if src.num_ranks == dst.num_ranks else (src.share_nbytes, dst.share_nbytes)
    common = math.gcd(src.page_nbytes, dst.page_nbytes, *shares)
    return min(common & -common, _MOST_NBYTES)
