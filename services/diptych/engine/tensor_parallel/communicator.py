"""How ranks add up and collect what they computed.

Every rank calls the same collectives in the same order, because all apply the same log of steps. The order of a sum
depends on shapes alone, so equal inputs give equal bits, and the same ones on every rank.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_TIMEOUT: Final = timedelta(minutes=5)  # the last resort: whoever started the ranks notices a dead one at once


class Communicator(Protocol):
    """The collectives of one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum over all ranks."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return every rank's `x` in order on rank 0, None on the others. All must have one shape."""
        ...


class TorchCommunicator:
    """Implements `Communicator` over torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """Meet the other ranks through the file `store`, in a folder that only they can read."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one host; its name may not resolve
        self.rank = rank
        self.size = size
        backend, meeting = _BACKENDS[device.type], f"file://{store}"
        dist.init_process_group(backend, meeting, _TIMEOUT, rank=rank, world_size=size)
        self.all_reduce(torch.zeros(1, device=device))  # NCCL connects now, while the store is there

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts)
        return parts

    def close(self) -> None:
        dist.destroy_process_group()
