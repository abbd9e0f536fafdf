"""The KV pool as the tensor that attention reads and writes.

A page is one contiguous piece for all layers, so that it moves in one write. The memory is the transfer engine's, or
where nothing moves the tensor's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.values.kv_regions import kv_regions, own_regions
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.kvtransfer.transport import DevicePages, Pool, TransportMemory

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # of states
KV_DTYPES: Final = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}


def kv_view(buffer: memoryview, layout: PoolLayout) -> Tensor:
    """Return `buffer` as a tensor of `layout.shape`, without a copy.

    The tensor keeps the Python buffer alive, not the memory behind it: whoever allocated that must outlive the tensor.
    """
    dtype = KV_DTYPES[layout.dtype]
    return torch.frombuffer(buffer, dtype=dtype, count=layout.nbytes // dtype.itemsize).view(layout.shape)


def own_views(kv: Tensor, config: ModelConfig, main: ModelConfig | None) -> tuple[Tensor, ...]:
    """Return the views of a pool, see `region_views`, that the layers of `config` use.

    `main`: the model behind whose layers they lie, as its draft; None: they are the first ones.
    """
    dtype = next(name for name, dtype in KV_DTYPES.items() if dtype == kv.dtype)
    views = region_views(kv, kv_regions(main or config, dtype))
    num_own = len(own_regions(config, dtype, config.num_kv_heads))
    return views[:num_own] if main is None else views[-num_own:]


def region_views(kv: Tensor, regions: Sequence[Region]) -> tuple[Tensor, ...]:
    """Return a pool as `[num_pages, num_layers, num_planes, page_size, num_heads, head_dim]` of each of its regions.

    Nothing is copied. `kv` is of `PoolLayout.shape`; of several regions each view has gaps between its pages.
    """
    if len(regions) == 1:
        return (kv,)
    page_size = kv.shape[1] // sum(math.prod(region.shape(1)) for region in regions)
    shapes = [region.shape(page_size) for region in regions]
    parts = torch.split(kv, [math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.view(len(kv), *shape) for part, shape in zip(parts, shapes, strict=True))


def device_view(pages: DevicePages, device: torch.device) -> Tensor:
    """Do the same to pages in the memory of a CUDA device, without those behind them that links are tested with."""
    layout = pages.layout
    everything: Tensor = torch.as_tensor(pages, device=device)  # bytes
    return everything[: layout.num_pages].view(KV_DTYPES[layout.dtype]).view(layout.shape)


def shared_kv(memory: TransportMemory, layout: PoolLayout, device: torch.device) -> tuple[Pool | DevicePages, Tensor]:
    """Allocate a pool on `device` that peers write into; return it and its view. Raises `ConfigError`, `TransferError`.

    Pages on a GPU leave when the kernels are done that were queued, until then, on the stream that is current.
    """
    if device.type == "cpu":
        pool = memory.allocate_pool(layout)
        return pool, kv_view(pool.buffer, layout)
    from diptych.kernels.gpu.pages.transfer_images import transfer_kernels  # needs Triton

    assert device.index is not None, device
    kernels = transfer_kernels(device.index, layout.page_shape)
    place = Device("cuda", device.index, kernels, lambda: torch.cuda.current_stream(device).cuda_stream)
    pages = memory.allocate_device_pool(layout, place)
    return pages, device_view(pages, device)


def new_kv(layout: PoolLayout, device: torch.device) -> Tensor:
    """Return the pool of an engine without peers, zeroed."""
    return torch.zeros(layout.shape, dtype=KV_DTYPES[layout.dtype], device=device)


def kv_bytes(kv: Tensor) -> memoryview:
    """Return a pool in host memory as bytes, without a copy."""
    return kv.view(torch.uint8).view(-1).numpy().data
