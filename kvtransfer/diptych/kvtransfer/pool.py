"""Page memory of this process, the host's or a device's. It belongs to the transport that allocated it.

The memory is plain and page-major. `DevicePool` has `__cuda_array_interface__`: `torch.as_tensor(pool, device=...)` is
a view of it, and so do CuPy's and JAX's. Ordering: operations wait for the program's kernels where `Device.stream` or
`order_after` says for which. Once a note has arrived, the pages before it are seen by every kernel that is launched
after that. Needs no GPU library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from diptych.kernels.page_pack import U8
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.errors import PageOutOfRange
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.plan import Parts
from diptych.kvtransfer.transport import PageIndices

PROBE_NBYTES: Final = 1 << 20  # what a link is tested with ...
MIN_PROBE_PAGES: Final = 4
MAX_PROBE_PAGES: Final = 64  # ... unless the pages are tiny
TURN_NBYTES: Final = 4 << 20  # of work on our own pages at a time

_PATTERN_STEP: Final = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no word comes twice


class _PoolPages:
    """What pools have in common: behind the pages of the layout are those for tests of links."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout

    @property
    def probe_pages(self) -> PageIndices:
        return np.arange(self.layout.num_pages, first_pattern_page(self.layout), dtype=np.int32)

    @property
    def pattern_pages(self) -> PageIndices:
        return np.arange(first_pattern_page(self.layout), num_pages_to_allocate(self.layout), dtype=np.int32)


class HostPool(_PoolPages):
    """Pages in host memory. Views of it must not be touched after the transport was closed."""

    def __init__(self, layout: PoolLayout, memory: memoryview) -> None:
        super().__init__(layout)
        self.memory = memory  # all pages, those for tests included

    @property
    def buffer(self) -> memoryview:
        return self.memory[: self.layout.nbytes]

    @property
    def rows(self) -> U8:
        """All pages, those for tests included, `[num_pages, page_nbytes]`."""
        return np.frombuffer(self.memory, np.uint8).reshape(-1, self.layout.page_nbytes)

    def fill_pattern(self, seed: int) -> None:
        memory = self.memory[first_pattern_page(self.layout) * self.layout.page_nbytes :]
        np.frombuffer(memory, dtype=np.uint8)[:] = probe_pattern(seed, len(memory))


class DevicePool(_PoolPages):
    """Pages in device memory. Gone with the transport that allocated it."""

    def __init__(
        self,
        layout: PoolLayout,
        device: Device,
        address: int,
        order_after: Callable[[int], None],
        copy: Callable[[int, Any, bool], None],
    ) -> None:
        super().__init__(layout)
        self.device = device
        self.address = address  # of page 0, on the device
        self._order_after = order_after
        self._copy = copy

    def fill_pattern(self, seed: int) -> None:
        """Fill the pattern pages, and return when the device has done it."""
        pattern = probe_pattern(seed, len(self.pattern_pages) * self.layout.page_nbytes)
        for page, data in zip(self.pattern_pages, pattern.reshape(-1, self.layout.page_nbytes), strict=True):
            self.store(int(page), data.tobytes())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All pages, as bytes `[num_pages, page_nbytes]`."""
        assert self.device.kind == "cuda", "memory of the host"
        shape = (num_pages_to_allocate(self.layout), self.layout.page_nbytes)
        return {"shape": shape, "typestr": "|u1", "data": (self.address, False), "version": 3}

    def order_after(self, stream: int) -> None:
        """Let operations that are submitted from now on wait for what the CUDA stream was given so far.

        `stream` is a `cudaStream_t` (`torch.cuda.current_stream().cuda_stream`). For pages that kernels are still
        writing. Costs some microseconds, and the stream itself waits for nothing.
        """
        self._order_after(stream)

    def order_after_kernels(self) -> None:
        """Let operations that are submitted from now on wait for the kernels that `Device.stream` has been given."""
        if self.device.stream is not None:
            self.order_after(self.device.stream())

    def load(self, page: int) -> bytes:
        """Return a page's bytes, when the device has brought them: for tests and tools."""
        data = bytearray(self.layout.page_nbytes)
        self._copy(page, np.frombuffer(data, dtype=np.uint8), False)
        return bytes(data)

    def store(self, page: int, data: bytes) -> None:
        """Overwrite a page, and return when the device has done it: for tests and tools."""
        assert len(data) == self.layout.page_nbytes, len(data)
        self._copy(page, np.frombuffer(data, dtype=np.uint8), True)


@dataclass(slots=True, eq=False)
class OwnWork:
    """What is done with host pages of ours beside transfers: their digest, or putting together what landed in parts."""

    operation: int
    pages: list[int]  # still to be done
    parts: tuple[Parts, ...] | None  # None: a digest
    digest: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.digest = 0 if self.parts is None else None

    def go_on(self, pool: HostPool) -> bool:
        """Do some pages; return whether that was all. Heartbeats do not wait for a long prompt."""
        nbytes, rows = pool.layout.page_nbytes, pool.rows
        for _ in range(min(len(self.pages), max(1, TURN_NBYTES // nbytes))):
            page = self.pages.pop()
            if self.digest is not None:
                self.digest = add_digests(self.digest, digest_bytes(rows[page], page * nbytes))
            for parts in self.parts or ():
                parts.unpack(rows[page])
        return not self.pages


def num_pages_to_allocate(layout: PoolLayout) -> int:
    """Return the pages of the layout, the probe pages behind them, and the pattern pages behind those."""
    return layout.num_pages + _num_test_pages(layout)


def first_pattern_page(layout: PoolLayout) -> int:
    """Return the first page behind the probe pages."""
    return num_pages_to_allocate(layout) - _num_test_pages(layout) // 4


def _num_test_pages(layout: PoolLayout) -> int:
    enough = -(-PROBE_NBYTES // layout.page_nbytes)
    return min(max(enough, MIN_PROBE_PAGES), MAX_PROBE_PAGES)


def probe_pattern(seed: int, nbytes: int) -> U8:
    """Return bytes that follow from `seed` and differ everywhere from those of another one."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * _PATTERN_STEP ^ np.uint64(seed)
    return words.view(np.uint8)[:nbytes]


def check_pages(pages: PageIndices, num_pages: int) -> None:
    """Raise `PageOutOfRange` unless every index names a page of a pool of `num_pages`."""
    outside = pages[(pages < 0) | (pages >= num_pages)]
    if outside.size:
        raise PageOutOfRange(f"page {outside[0]} is not in a pool of {num_pages} pages")
