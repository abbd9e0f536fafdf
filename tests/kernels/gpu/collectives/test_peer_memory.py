"""Memory for peers by a driver that refuses, in place of CUDA's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from diptych.kernels.gpu.collectives.peer_memory import PeerMemory, PeerMemoryError


class Driver:
    """Notes its calls, and refuses one of them."""

    def __init__(self, refused: str) -> None:
        self._refused = refused
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return int(name == self._refused)

        return call


def allocated(monkeypatch: pytest.MonkeyPatch, refused: str) -> tuple[Driver, PeerMemory | None]:
    driver = Driver(refused)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    try:
        return driver, PeerMemory(1 << 20)
    except PeerMemoryError:
        return driver, None


@pytest.mark.parametrize("refused", ["cuMemsetD8_v2", "cuCtxSynchronize", "cuIpcGetMemHandle"])
def test_memory_that_can_not_be_shown_to_peers_is_freed(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    driver, memory = allocated(monkeypatch, refused)
    assert memory is None
    assert driver.calls[-2:] == ["cuGetErrorString", "cuMemFree_v2"]


def test_what_was_not_allocated_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, memory = allocated(monkeypatch, "cuMemAlloc_v2")
    assert memory is None
    assert "cuMemFree_v2" not in driver.calls


def test_peers_memory_is_closed_once_and_before_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, memory = allocated(monkeypatch, "")
    assert memory is not None
    memory.addresses(0, [memory.handle, memory.handle])
    driver.calls.clear()
    memory.close_peers()
    memory.close()
    assert driver.calls == ["cuIpcCloseMemHandle", "cuMemFree_v2"]
