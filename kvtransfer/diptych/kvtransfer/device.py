"""Pools in the memory of a device: which device, and what a program sees of such a pool. Needs no GPU library.

The memory is plain and page-major. `DevicePool` has `__cuda_array_interface__`: `torch.as_tensor(pool, device=...)` is
a view of it, and so do CuPy's and JAX's. Ordering: operations wait for the program's kernels where `Device.stream` or
`order_after` says for which. Once a note has arrived, the pages before it are seen by every kernel that is launched
after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from diptych.common.errors import ConfigError
from diptych.kernels.image import TransferKernels
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import first_pattern_page, num_pages_to_allocate, probe_pattern
from diptych.kvtransfer.transport import PageIndices

LINE_NBYTES: Final = 128  # what devices copy in

DeviceKind = Literal["cuda", "emulated"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a pool is. "emulated" is host memory that is treated as a device's, for tests."""

    kind: DeviceKind
    ordinal: int = 0  # among those that the program sees
    kernels: TransferKernels | None = None  # compiled for it; the emulation needs none
    stream: Callable[[], int] | None = (
        None  # `cudaStream_t` of who writes pages: asked when a transport is to read some
    )

    def validate(self, layout: PoolLayout) -> None:
        """Raise `ConfigError` when there are no kernels, or the pages of `layout` can't be moved by them."""
        if self.kind == "cuda" and self.kernels is None:
            raise ConfigError("a pool on a CUDA device needs the kernels that move its pages")
        if layout.layer_nbytes % LINE_NBYTES:
            raise ConfigError(
                f"a layer of a KV page on a device must be a multiple of {LINE_NBYTES} bytes, not {layout.layer_nbytes}"
            )


class DevicePool:
    """Pages in device memory, and behind them the probe pages. Gone with the transport that allocated it."""

    def __init__(
        self,
        layout: PoolLayout,
        device: Device,
        address: int,
        order_after: Callable[[int], None],
        copy: Callable[[int, Any, bool], None],
    ) -> None:
        self.layout = layout
        self.device = device
        self.address = address  # of page 0, on the device
        self._order_after = order_after
        self._copy = copy

    @property
    def num_pages(self) -> int:
        """Probe pages included."""
        return num_pages_to_allocate(self.layout)

    @property
    def probe_pages(self) -> PageIndices:
        return np.arange(self.layout.num_pages, first_pattern_page(self.layout), dtype=np.int32)

    @property
    def pattern_pages(self) -> PageIndices:
        return np.arange(first_pattern_page(self.layout), self.num_pages, dtype=np.int32)

    def fill_pattern(self, seed: int) -> None:
        """Fill the pattern pages, and return when the device has done it."""
        pattern = probe_pattern(seed, len(self.pattern_pages) * self.layout.page_nbytes)
        for page, data in zip(self.pattern_pages, pattern.reshape(-1, self.layout.page_nbytes), strict=True):
            self.store(int(page), data.tobytes())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All pages, as bytes `[num_pages, page_nbytes]`."""
        assert self.device.kind == "cuda", "memory of the host"
        shape = (self.num_pages, self.layout.page_nbytes)
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
