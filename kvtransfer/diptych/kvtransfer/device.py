"""Which device a pool is in the memory of. Needs no GPU library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from diptych.common.errors import ConfigError
from diptych.kernels.image import TransferKernels
from diptych.kvtransfer.layout import LINE_NBYTES, PoolLayout

DeviceKind = Literal["cuda", "emulated"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a pool is. "emulated" is host memory that is treated as a device's, for tests."""

    kind: DeviceKind
    ordinal: int = 0  # among those that the program sees
    kernels: TransferKernels | None = None  # compiled for it; the emulation needs none
    stream: Callable[[], int] | None = None  # `cudaStream_t` of who writes pages; asked before each of our reads

    def validate(self, layout: PoolLayout) -> None:
        """Raise `ConfigError` when there are no kernels, or the pages of `layout` can't be moved by them."""
        if self.kind == "cuda" and self.kernels is None:
            raise ConfigError("a pool on a CUDA device needs the kernels that move its pages")
        for nbytes in (region.layer_nbytes(layout.page_size) for region in layout.regions):
            if nbytes % LINE_NBYTES:
                raise ConfigError(
                    f"a layer of a KV page on a device must be a multiple of {LINE_NBYTES} bytes, not {nbytes}"
                )
