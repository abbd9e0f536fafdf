"""How the bytes of pages get from a GPU's pool to host memory and back, on the stream that is current.

Out they go in two parts: a kernel gathers pages in a buffer on the GPU, at the speed of its memory, and then they leave
over the bus. So a page may be written again after the first part, and the second has long pieces to copy.

What goes over the bus is copied by the GPU's copy engines where its pieces are long, since those take nothing from
the steps beside them. Short ones are moved by one kernel, which reads and writes host memory by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.cache.host_pages import run_arrays
from diptych.engine.runner.gpu.bus import KernelBus
from diptych.engine.runner.gpu.copy_queues import StreamMark
from diptych.engine.runner.gpu.piece_copies import PieceCopies
from diptych.kernels.gpu.pages.page_mover import move_pages

PIECE_NBYTES: Final = 512 << 10  # the shortest for copy engines, on average: 10 us on the bus
GATHERING: Final = 64  # programs of a kernel that copies within the GPU
CROSSING: Final = 16  # and of one that copies over the bus, whose latency they hide
SPECIAL_COUNTS: Final = (1, 2, 3, 16)  # of pages: Triton compiles one, even, odd and sixteen apart


class PageMovement:
    """Moves pages between a pool, a buffer and host memory, each uint8 `[num_pages, page_nbytes]`."""

    def __init__(self, pool: Tensor, buffer: Tensor, host: Tensor, copies: PieceCopies) -> None:
        """`host` is pinned, the others are on the GPU. Pages are of whole words of 8 bytes."""
        self._pool, self._buffer, self._host = pool, buffer, host
        self._copies = copies
        self._page_nbytes: int = pool.shape[1]
        self._done = torch.zeros(1, dtype=torch.int32, device=pool.device)  # of kernels; nobody reads it
        self._bus = KernelBus(pool.device)
        self._uploads: deque[tuple[StreamMark, Tensor]] = (
            deque()
        )  # pinned memory that may still be read, and until when

    def warm_up(self) -> None:
        """Compile the kernel for all counts before requests wait. Moves nothing."""
        for count in SPECIAL_COUNTS:
            nowhere = np.zeros(count, np.int64)
            self._move(self._buffer, self._buffer, nowhere, nowhere, CROSSING)

    def read(self, pages: I64, first: int) -> None:
        """Gather `pages` of the pool in the buffer, from its page `first` on."""
        self._move(self._pool, self._buffer, pages, np.arange(first, first + len(pages)), GATHERING)

    def save(self, first: int, slots: I64) -> None:
        """Copy pages of the buffer, from `first` on, into slots of host memory, none of them twice."""
        self._cross(self._buffer, self._host, np.arange(first, first + len(slots)), slots)

    def restore(self, slots: I64, pages: I64) -> None:
        self._cross(self._host, self._pool, slots, pages)

    def _cross(self, src: Tensor, dst: Tensor, src_pages: I64, dst_pages: I64) -> None:
        sources, places, lengths = run_arrays(src_pages, dst_pages)
        if len(lengths) * PIECE_NBYTES > len(src_pages) * self._page_nbytes:
            self._move(src, dst, src_pages, dst_pages, CROSSING)
            return
        nbytes = self._page_nbytes
        self._copies.copy(dst.data_ptr() + places * nbytes, src.data_ptr() + sources * nbytes, lengths * nbytes)

    def _move(self, src: Tensor, dst: Tensor, src_pages: I64, dst_pages: I64, num_programs: int) -> None:
        indices = self._on_device(np.stack([src_pages, dst_pages]))
        move_pages(
            src.data_ptr(),
            dst.data_ptr(),
            indices[0],
            indices[1],
            self._page_nbytes,
            self._done,
            num_programs=num_programs,
        )

    def _on_device(self, indices: I64) -> Tensor:
        """Return the indices, past the copy engines: they may be busy with pages for a while."""
        host = torch.from_numpy(indices)
        if not self._done.is_cuda:
            return host
        while self._uploads and self._uploads[0][0].is_over:
            self._uploads.popleft()
        pinned, device = host.pin_memory(), torch.empty_like(host, device=self._done.device)
        self._bus.copy(device, pinned)
        self._uploads.append((StreamMark(), pinned))
        return device
