"""Page memory that NIXL may read and peers may write."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.nixl.agent import LOCAL, Agent
from diptych.kvtransfer.pool import HostPool, num_pages_to_allocate


class Memory:
    """Zeroed, touched, registered. It belongs to the engine's thread, but for `pool`."""

    def __init__(self, agent: Agent, layout: PoolLayout) -> None:
        nbytes = num_pages_to_allocate(layout) * layout.page_nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.pool = HostPool(layout, memoryview(self._map))
        self._agent = agent
        self._prepared: dict[tuple[int, int], Any] = {}  # handles, by offset and size of a window of each page
        agent.register(self.base, nbytes)

    def prepared(self, offset: int, nbytes: int) -> Any:
        """All pages, or a window of each."""
        if (offset, nbytes) not in self._prepared:
            layout = self.pool.layout
            base, count = self.base + offset, num_pages_to_allocate(layout)
            self._prepared[offset, nbytes] = self._agent.prepare(LOCAL, base, nbytes, layout.page_nbytes, count)
        return self._prepared[offset, nbytes]

    def window(self, page: int, offset: int, nbytes: int) -> memoryview:
        begin = page * self.pool.layout.page_nbytes + offset
        return self.pool.memory[begin : begin + nbytes]

    def release(self) -> None:
        for handle in self._prepared.values():
            self._agent.release(handle)
        self._prepared.clear()
