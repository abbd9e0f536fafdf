"""How the few bytes of a step cross between pinned host memory and its GPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Bus(Protocol):
    """Copies what both sides keep until it has run."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream: contiguous tensors of one length, aligned to 16 bytes."""
        ...


class CopyEngines:
    """Implements `Bus` by the engines that a GPU has for it: the least work for the host."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)


class KernelBus:
    """Implements `Bus` by a kernel, for a GPU whose copy engines carry pages: steps don't wait for those."""

    def __init__(self, device: torch.device) -> None:
        from diptych.kernels.gpu.pages.bus_copy import bus_copy  # needs Triton

        self._device = device
        self._copy = bus_copy

    def copy(self, to: Tensor, source: Tensor) -> None:
        self._copy(to, source, self._device)
