"""Bytes of pages, on the way that they take: as whole pieces, or by a kernel; in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.runner.gpu.pinned_memory import PinnedMemory, pinned_for_gpus

NUM_PAGES = 6
IN_ORDER, SCATTERED = (2, 3, 4, 5), (5, 0, 3, 1)


def host_memory(num_bytes: int, device: torch.device) -> PinnedMemory:
    if device.type == "cuda":
        return pinned_for_gpus(num_bytes)
    return PinnedMemory(num_bytes, lambda address, nbytes: None, lambda address: None)


@pytest.mark.parametrize("piece_nbytes", [0, 1 << 40], ids=["copied in pieces", "moved by a kernel"])
@pytest.mark.parametrize("page_nbytes", [40, 70_000])
@pytest.mark.parametrize("slots", [IN_ORDER, SCATTERED, SCATTERED[:1]])
def test_pages_go_down_and_come_back(
    page_nbytes: int, slots: tuple[int, ...], piece_nbytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.engine.runner.gpu import page_movement
    from diptych.engine.runner.gpu.page_movement import PageMovement

    monkeypatch.setattr(page_movement, "PIECE_NBYTES", piece_nbytes)
    torch.manual_seed(0)
    pool = torch.randint(0, 256, (NUM_PAGES, page_nbytes), dtype=torch.uint8, device=device)
    buffer = torch.zeros(NUM_PAGES, page_nbytes, dtype=torch.uint8, device=device)
    memory = host_memory(NUM_PAGES * page_nbytes, device)
    host = memory.tensor.view(NUM_PAGES, page_nbytes)
    movement: Any = PageMovement(pool, buffer, host)
    movement.warm_up()
    before, pages = pool.cpu(), np.array([4, 1, 0, 3])[: len(slots)]
    movement.read(pages, 2)
    movement.save(2, np.array(slots))
    pool.zero_()
    movement.restore(np.array(slots), pages)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[list(slots)], before[pages])
    expected = torch.zeros_like(before)
    expected[pages] = before[pages]
    assert torch.equal(pool.cpu(), expected)
    memory.close()
