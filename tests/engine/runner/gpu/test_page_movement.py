"""Bytes of pages, on the way that they take: as whole pieces, or by a kernel; in the interpreter or on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.runner.gpu.piece_copies import PieceCopies, SingleCopies, copies_of_this_driver, piece_copies
from diptych.engine.runner.gpu.pinned_memory import PinnedMemory, pinned_for_gpus

NUM_PAGES = 6
IN_ORDER, SCATTERED = (2, 3, 4, 5), (5, 0, 3, 1)


def host_memory(num_bytes: int, device: torch.device) -> PinnedMemory:
    if device.type == "cuda":
        return pinned_for_gpus(num_bytes)
    return PinnedMemory(num_bytes, lambda address, nbytes: None, lambda address: None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_one(to: Any, source: Any, nbytes: Any, stream: Any) -> int:
    ctypes.memmove(to.value, source.value, nbytes.value)
    return 0


def copy_batch(
    to: Any, sources: Any, sizes: Any, count: Any, attributes: Any, first: Any, num: Any, stream: Any
) -> int:
    """Do in host memory what `cuMemcpyBatchAsync` does, from the last copy to the first."""
    places, origins, lengths = (
        (ctypes.c_size_t * count.value).from_address(array.value) for array in (to, sources, sizes)
    )
    for i in reversed(range(count.value)):
        ctypes.memmove(places[i], origins[i], lengths[i])
    return 0


OLD_DRIVER = SimpleNamespace(cuMemcpyAsync=copy_one)
NEW_DRIVER = SimpleNamespace(cuMemcpyAsync=None, cuMemcpyBatchAsync_v2=copy_batch)


def copies_for(device: torch.device, driver: SimpleNamespace) -> PieceCopies:
    if device.type != "cuda":
        return piece_copies(driver, lambda: 1)
    if driver is NEW_DRIVER:
        return copies_of_this_driver()
    return SingleCopies(ctypes.CDLL("libcuda.so.1").cuMemcpyAsync, lambda: int(torch.cuda.current_stream().cuda_stream))


def test_a_driver_that_refuses_copies_is_heard() -> None:
    driver = SimpleNamespace(cuMemcpyAsync=lambda *_: 700, cuMemcpyBatchAsync_v2=lambda *_: 700)
    ones = np.ones(2, np.int64)
    for copies in (piece_copies(driver, lambda: 1), SingleCopies(driver.cuMemcpyAsync, lambda: 1)):
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            copies.copy(ones, ones, ones)


@pytest.mark.parametrize(
    ("piece_nbytes", "driver"),
    [
        pytest.param(0, OLD_DRIVER, id="copied one by one"),
        pytest.param(0, NEW_DRIVER, id="copied in a batch"),
        pytest.param(1 << 40, NEW_DRIVER, id="moved by a kernel"),
    ],
)
@pytest.mark.parametrize("page_nbytes", [40, 70_000])
@pytest.mark.parametrize("slots", [IN_ORDER, SCATTERED, SCATTERED[:1]])
def test_pages_go_down_and_come_back(
    page_nbytes: int,
    slots: tuple[int, ...],
    piece_nbytes: int,
    driver: SimpleNamespace,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from diptych.engine.runner.gpu import page_movement
    from diptych.engine.runner.gpu.page_movement import PageMovement

    monkeypatch.setattr(page_movement, "PIECE_NBYTES", piece_nbytes)
    torch.manual_seed(0)
    pool = torch.randint(0, 256, (NUM_PAGES, page_nbytes), dtype=torch.uint8, device=device)
    buffer = torch.zeros(NUM_PAGES, page_nbytes, dtype=torch.uint8, device=device)
    memory = host_memory(NUM_PAGES * page_nbytes, device)
    host = memory.tensor.view(NUM_PAGES, page_nbytes)
    movement: Any = PageMovement(pool, buffer, host, copies_for(device, driver))
    movement.warm_up()
    before, pages = pool.cpu(), np.array([4, 1, 0, 3])[: len(slots)]
    synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext():
        movement.read(pages, 2)
        movement.save(2, np.array(slots))
        pool.zero_()
        movement.restore(np.array(slots), pages)
    synchronize(device)
    assert torch.equal(host[list(slots)], before[pages])
    expected = torch.zeros_like(before)
    expected[pages] = before[pages]
    assert torch.equal(pool.cpu(), expected)
    memory.close()
