"""Makes the page pool of an engine, in host memory or on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from diptych.kernels.image import KernelImage, TransferKernels
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import DevicePool, HostPool, num_pages_to_allocate
from diptych.kvtransfer.ucx import binding
from diptych.kvtransfer.ucx.conversion import accepted

_ERROR_NBYTES: Final = 512


def allocate_host_pool(engine: int, layout: PoolLayout) -> HostPool:
    layout.validate()
    address = _allocate(layout, lambda *pool: binding.library().kvt_allocate(engine, *pool))
    nbytes = num_pages_to_allocate(layout) * layout.page_nbytes
    return HostPool(layout, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))


def allocate_device_pool(engine: int, layout: PoolLayout, device: Device) -> DevicePool:
    layout.validate()
    device.validate(layout)
    shim, options = binding.library(), _device_options(device)
    address = _allocate(layout, lambda *pool: shim.kvt_allocate_on_device(engine, ctypes.byref(options), *pool))

    def order_after(stream: int) -> None:
        accepted(shim.kvt_follow(engine, stream))

    def copy(page: int, data: Any, to_device: bool) -> None:
        accepted(shim.kvt_copy_page(engine, page, data.ctypes.data, to_device))

    return DevicePool(layout, device, address, order_after, copy)


def _allocate(layout: PoolLayout, allocate: Callable[..., int]) -> int:
    address, error = ctypes.c_void_p(), ctypes.create_string_buffer(_ERROR_NBYTES)
    num_pages = num_pages_to_allocate(layout)
    if allocate(layout.page_nbytes, num_pages, ctypes.byref(address), error, _ERROR_NBYTES) != 0:
        words = error.value.decode()
        raise TransferError(f"{words} ({layout.nbytes / 2**20:.0f} MiB; UCX_LOG_LEVEL=info shows more)")
    assert address.value is not None
    return address.value


def _device_options(device: Device) -> binding.DeviceOptions:
    options = binding.DeviceOptions(kind=binding.DEVICE_KINDS[device.kind], ordinal=device.ordinal)
    if device.kernels is not None:
        for place, image in enumerate(_images(device.kernels)):
            if image is not None:
                options.kernels[place] = _kernel(image)
    return options


def _images(kernels: TransferKernels) -> tuple[KernelImage | None, ...]:
    """In the order in which the shim has them."""
    packers = (kernels.packers.get(pair) for pair in binding.PACKERS)
    return (kernels.mover, kernels.digester, kernels.unpacker, *packers)


def _kernel(image: KernelImage) -> binding.Kernel:
    numbers = image.num_warps, image.shared_nbytes, image.num_programs, image.chunk
    return binding.Kernel(image.binary, image.name.encode(), *numbers)
