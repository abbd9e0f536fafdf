"""Host memory that a GPU reads and writes by itself: allocated by the system, touched by threads, then pinned."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.runner.gpu.memory import GIB

logger = logging.getLogger(__name__)

PIECE_NBYTES: Final = 128 << 20  # that a thread touches at a time
SMALL_PAGE: Final = 4096  # of the system's memory: one byte of each is touched
MOST_THREADS: Final = 8

Pin = Callable[[int, int], None]  # of so many bytes at an address; raises `RuntimeError`


class PinnedMemory:
    """`tensor`: uint8 `[num_bytes]`, at the same address for the host and for every GPU of the process.

    `close` it before the last reference to the tensor goes, or end the process.
    """

    def __init__(self, num_bytes: int, pin: Pin, unpin: Callable[[int], None]) -> None:
        """Raises `ConfigError` where so much can't be had.

        Pages of the system appear when they are touched, which threads do; to pin what is there takes a fraction of
        what `cudaHostAlloc` takes, which does both alone. Huge pages make both faster.
        """
        began_s = time.monotonic()
        self._memory = _new_memory(num_bytes)
        array = np.frombuffer(self._memory, np.uint8)
        pieces = [array[start : start + PIECE_NBYTES] for start in range(0, num_bytes, PIECE_NBYTES)]
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(_touch, pieces))
        touched_s = time.monotonic()
        try:
            pin(array.ctypes.data, num_bytes)  # at once: no copy may cross from one pinned piece into the next
        except RuntimeError as error:
            raise ConfigError(f"{num_bytes / GIB:.1f} GiB of host memory can't be pinned ({error})") from error
        self.tensor: Tensor = torch.from_numpy(array)
        self._unpin, self._is_open = unpin, True
        words = "pinned %.1f GiB of host memory in %.1f s, of which %.1f s to get it"
        logger.info(words, num_bytes / GIB, time.monotonic() - began_s, touched_s - began_s)

    def close(self) -> None:
        """No GPU uses it any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._unpin(self.tensor.data_ptr())


def pinned_for_gpus(num_bytes: int) -> PinnedMemory:
    return PinnedMemory(num_bytes, _pin, _unpin)


def _pin(address: int, num_bytes: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))


def _unpin(address: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _new_memory(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{num_bytes / GIB:.1f} GiB of host memory can't be had ({error})") from error
    with contextlib.suppress(OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _touch(piece: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    piece[::SMALL_PAGE] = 0
