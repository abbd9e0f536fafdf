"""The KV tensor lies on the transfer engine's memory."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.runner.kv_pool import device_view, kv_bytes, kv_view, new_kv, region_views, shared_kv
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.digest import digest_bytes
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.kvtransfer.pool import DevicePool, num_pages_to_allocate
from diptych.kvtransfer.transport import OpDone
from diptych.kvtransfer.ucx import UcxOptions, open_transport


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_writing_the_tensor_writes_the_buffer_page_by_page(dtype: str, expected: torch.dtype) -> None:
    layout = PoolLayout.kv(num_pages=4, num_layers=2, page_size=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    buffer = memoryview(bytearray(layout.nbytes))
    kv = kv_view(buffer, layout)
    assert (kv.shape, kv.dtype, kv.is_contiguous()) == (layout.shape, expected, True)
    kv[2] = 1.0
    touched = [any(buffer[page * layout.page_nbytes : (page + 1) * layout.page_nbytes]) for page in range(4)]
    assert touched == [False, False, True, False]


def test_each_region_of_a_page_is_seen_where_it_lies() -> None:
    """Three layers have latents, which lie in front, and two of them have index keys."""
    regions = Region((0, 1, 2), 1, 1, 8, "bfloat16", 1), Region((0, 2), 1, 1, 4, "bfloat16", 1)
    layout = PoolLayout(num_pages=5, page_size=2, regions=regions)
    kv = new_kv(layout, torch.device("cpu"))
    latents, keys = region_views(kv, regions)
    assert (latents.shape, keys.shape) == ((5, 3, 1, 2, 1, 8), (5, 2, 1, 2, 1, 4))
    keys[3, 1] = 1.0
    buffer = kv_bytes(kv)
    touched = [place for place, byte in enumerate(buffer[::2]) if byte or buffer[2 * place + 1]]
    end_of_page = 4 * layout.page_nbytes // 2
    assert touched == list(range(end_of_page - 8, end_of_page)), "the last layer's two tokens of four numbers"
    assert kv_view(buffer, layout).shape == layout.shape == (5, 48 + 16)


def test_the_bytes_of_a_pool_are_its_memory() -> None:
    layout = PoolLayout.kv(num_pages=2, num_layers=1, page_size=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
    kv = new_kv(layout, torch.device("cpu"))
    data = kv_bytes(kv)
    assert (len(data), bytes(data)) == (layout.nbytes, bytes(layout.nbytes))
    kv_view(data, layout)[1] = 1.0
    assert kv[1].eq(1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_on_a_device_is_seen_where_it_lies() -> None:
    layout = PoolLayout.kv(num_pages=4, num_layers=2, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")

    def unused(*_: Any) -> None:
        raise AssertionError

    num_pages = num_pages_to_allocate(layout)
    memory = torch.zeros(num_pages, layout.page_nbytes, dtype=torch.uint8, device="cuda:0")
    pool = DevicePool(layout, Device("cuda"), memory.data_ptr(), unused, unused)
    kv = device_view(pool, torch.device("cuda:0"))
    assert (kv.shape, kv.dtype, kv.data_ptr()) == (layout.shape, torch.bfloat16, memory.data_ptr())
    kv[2] = 1.0
    assert memory.any(dim=1).tolist() == [page == 2 for page in range(num_pages)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_that_kernels_are_still_writing_are_read_when_they_are_written() -> None:
    layout = PoolLayout.kv(num_pages=64, num_layers=4, page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    transport = open_transport(1, options=UcxOptions(transports="tcp"))
    pool, kv = shared_kv(transport, layout, torch.device("cuda:0"))
    assert isinstance(pool, DevicePool)
    slow, poller = torch.randn(4096, 4096, device="cuda:0"), select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    for value in range(1, 6):
        for _ in range(8):
            torch.mm(slow, slow)
        kv[7] = value
        pool.order_after_kernels()  # as before pages are sent
        operation = transport.digest_pages(np.array([7]))
        while not (events := transport.poll()):
            assert poller.poll(10_000), "no digest"
        expected = digest_bytes(kv[7].cpu().view(torch.uint8).numpy().tobytes(), 7 * layout.page_nbytes)
        assert events == [OpDone(operation, None, expected)]
    torch.cuda.synchronize()
    transport.close()
