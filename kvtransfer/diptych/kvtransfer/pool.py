"""Page memory of this process. It belongs to the transport that allocated it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.errors import PageOutOfRange
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PageIndices

PROBE_NBYTES: Final = 1 << 20  # what a link is tested with ...
MIN_PROBE_PAGES: Final = 4
MAX_PROBE_PAGES: Final = 64  # ... unless the pages are tiny

_PATTERN_STEP: Final = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no word comes twice


class HostPool:
    """Pages in host memory. Views of it must not be touched after the transport was closed."""

    def __init__(self, layout: PoolLayout, memory: memoryview) -> None:
        self.layout = layout
        self.memory = memory  # all pages, and behind them those for tests of links

    @property
    def buffer(self) -> memoryview:
        return self.memory[: self.layout.nbytes]

    @property
    def probe_pages(self) -> PageIndices:
        return np.arange(self.layout.num_pages, first_pattern_page(self.layout), dtype=np.int32)

    @property
    def pattern_pages(self) -> PageIndices:
        return np.arange(first_pattern_page(self.layout), num_pages_to_allocate(self.layout), dtype=np.int32)

    def fill_pattern(self, seed: int) -> None:
        memory = self.memory[first_pattern_page(self.layout) * self.layout.page_nbytes :]
        np.frombuffer(memory, dtype=np.uint8)[:] = probe_pattern(seed, len(memory))


def num_pages_to_allocate(layout: PoolLayout) -> int:
    """Return the pages of the layout, the probe pages behind them, and the pattern pages behind those."""
    return layout.num_pages + _num_test_pages(layout)


def first_pattern_page(layout: PoolLayout) -> int:
    """Return the first page behind the probe pages."""
    return num_pages_to_allocate(layout) - _num_test_pages(layout) // 4


def _num_test_pages(layout: PoolLayout) -> int:
    enough = -(-PROBE_NBYTES // layout.page_nbytes)
    return min(max(enough, MIN_PROBE_PAGES), MAX_PROBE_PAGES)


def probe_pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes that follow from `seed` and differ everywhere from those of another one."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * _PATTERN_STEP ^ np.uint64(seed)
    return words.view(np.uint8)[:nbytes]


def check_pages(pages: PageIndices, num_pages: int) -> None:
    """Raise `PageOutOfRange` unless every index names a page of a pool of `num_pages`."""
    outside = pages[(pages < 0) | (pages >= num_pages)]
    if outside.size:
        raise PageOutOfRange(f"page {outside[0]} is not in a pool of {num_pages} pages")
