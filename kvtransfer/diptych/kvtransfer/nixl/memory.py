"""Memory that NIXL may read and peers may write: the pool, and images of pages for pools of another layout."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.kernels.page_pack import PagePack, pack_page
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.nixl.agent import LOCAL, Agent
from diptych.kvtransfer.nixl.streams import PIECE_NBYTES
from diptych.kvtransfer.pool import HostPool, num_pages_to_allocate

PIECES_AHEAD: Final = 4  # images that are made while others are on their way

Indices = npt.NDArray[np.integer[Any]]


class Registered:
    """`count` pieces of `stride` bytes: zeroed, touched, registered."""

    def __init__(self, agent: Agent, stride: int, count: int) -> None:
        self.stride = stride
        self._count = count
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        try:
            self._map = mmap.mmap(-1, stride * count, flags=flags)
        except OSError as error:
            raise TransferError(f"no memory for {stride * count} bytes to stage pages in: {error}") from None
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = memoryview(self._map)
        self.rows = np.frombuffer(self._map, np.uint8).reshape(count, stride)
        self._agent = agent
        self._prepared: dict[tuple[int, int], Any] = {}  # handles, by offset and size of a window of each piece
        agent.register(self.base, len(self.bytes))

    def prepared(self, offset: int, nbytes: int) -> Any:
        """All pieces, or a window of each."""
        if (offset, nbytes) not in self._prepared:
            handle = self._agent.prepare(LOCAL, self.base + offset, nbytes, self.stride, self._count)
            self._prepared[offset, nbytes] = handle
        return self._prepared[offset, nbytes]

    def window(self, piece: int, offset: int, nbytes: int) -> memoryview:
        begin = piece * self.stride + offset
        return self.bytes[begin : begin + nbytes]


class Memory:
    """The pool. It belongs to the engine's thread."""

    def __init__(self, agent: Agent, layout: PoolLayout) -> None:
        self.registered = Registered(agent, layout.page_nbytes, num_pages_to_allocate(layout))
        self.pool = HostPool(layout, self.registered.bytes)


class Staging:
    """Images of pages on their way to pools of one layout."""

    def __init__(self, agent: Agent, memory: Memory, pack: PagePack) -> None:
        self.max_pages = max(1, PIECE_NBYTES // pack.image_nbytes)  # of a piece
        num_images = PIECES_AHEAD * self.max_pages
        self.registered = Registered(agent, pack.image_nbytes, num_images)
        self._memory = memory
        self._pack = pack
        self._free = deque(range(num_images))

    @property
    def has_room(self) -> bool:
        """For another piece."""
        return len(self._free) >= self.max_pages

    def fill(self, src_pages: Indices, first_tokens: Indices) -> npt.NDArray[np.int32]:
        """Make images; return where they are, until `free`."""
        places = [self._free.popleft() for _ in first_tokens]
        for place, first_token in zip(places, first_tokens.tolist(), strict=True):
            self.registered.rows[place] = pack_page(self._pack, self._memory.registered.rows, src_pages, first_token)
        return np.array(places, dtype=np.int32)

    def free(self, places: Indices) -> None:
        self._free.extend(places.tolist())
