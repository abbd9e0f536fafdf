"""What one rank sends into the pages of another, as values: which bytes of each page, and of which pages. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer.errors import TransferError

I64 = npt.NDArray[np.int64]

NO_TOKENS: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ByteWindow:
    """The bytes that move of each page: at `src` of a page of ours, or of an image, and at `dst` of the peer's page."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """What one rank writes of one region into the pages of another."""

    pack: PagePack | None  # how an image is made; None: the region moves as it is
    layers: tuple[int, ...]  # of the model
    src: int  # where it begins in a page of ours, or in the image; bytes
    dst: int  # and in the target page
    layer_nbytes: int
    turn: int = 0  # this rank sends target page p where p % num_turns == turn
    num_turns: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes that land in each target page."""
        return len(self.layers) * self.layer_nbytes

    def window(self, first_layer: int, end_layer: int) -> ByteWindow:
        """Return the bytes of the layers `[first_layer, end_layer)` of the model: maybe none."""
        first, end = bisect_left(self.layers, first_layer), bisect_left(self.layers, end_layer)
        begin = first * self.layer_nbytes
        return ByteWindow(self.src + begin, self.dst + begin, (end - first) * self.layer_nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes of one write, of one region or of several that lie together: one a target page."""

    src: I64  # whole pages: `src[i]` goes to `dst[i]`; packed ones: all that the tokens are in
    first_tokens: I64  # of each image, among those of `src`; none for whole pages
    dst: I64
    window: ByteWindow
    pack: PagePack | None = None


def cut(copy: Copy, window: ByteWindow, src: I64, dst: I64, skip_tokens: int) -> Runs:
    """Return what a rank sends of tokens, from `skip_tokens` of those in `src` on. Raises `TransferError`."""
    mine = dst % copy.num_turns == copy.turn
    if copy.pack is not None:
        first_tokens = skip_tokens + np.flatnonzero(mine) * copy.pack.dst_page_size
        return Runs(src, first_tokens, dst[mine], window, copy.pack)
    if len(src) != len(dst) or skip_tokens:
        raise TransferError(f"{len(src)} source pages but {len(dst)} target pages, of one size")
    return Runs(src[mine], NO_TOKENS, dst[mine], window) if copy.num_turns > 1 else Runs(src, NO_TOKENS, dst, window)
