"""Small sums of ranks on GPUs of one host by our own kernel: its memory opened, agreed upon by all, or left to NCCL.

CUDA's IPC needs processes that may see each other's GPUs; containers and some virtual machines forbid it. One rank that
can't have it is enough: then nobody does, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from diptych.kernels.gpu.collectives.meeting import MAX_POLLS
from diptych.kernels.gpu.collectives.one_shot import LARGEST_NBYTES, OneShotSum, fits, memory_nbytes
from diptych.kernels.gpu.collectives.peer_memory import HANDLE_NBYTES, PeerMemory, PeerMemoryError, has_native_atomics

logger = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST_GROUP: Final = 8  # ranks: of more, most of the time would go into stores of the same numbers


class Group(Protocol):
    """The ranks, before they have more than NCCL."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, of one shape, in order: on all ranks."""
        ...


class PeerSums:
    """The sums of one rank that go through the memory of peers. Made on all ranks at once, by `open_peer_sums`."""

    def __init__(self, one_shot: OneShotSum, memory: PeerMemory) -> None:
        self.one_shot = one_shot
        self._memory = memory  # kept as long as a graph may write to it: until the process ends
        self._largest = LARGEST_NBYTES // max(1, one_shot.size - 1)  # each rank sends its numbers to all others

    def has(self, x: Tensor) -> bool:
        """Return whether sums of such tensors are made here; the same on every rank."""
        return (
            x.dim() == 2
            and x.is_contiguous()
            and x.nbytes <= self._largest
            and fits(len(x), x.shape[1], x.element_size())
        )


def open_peer_sums(group: Group, device: torch.device, max_polls: int = MAX_POLLS) -> PeerSums | None:
    """Return this rank's; None on all ranks where one can't. All call it at once. `max_polls`: see `OneShotSum`."""
    if device.type != "cuda" or not 1 < group.size <= LARGEST_GROUP:
        return None
    opened = open_memory(group, device, memory_nbytes(group.size))
    if opened is None:
        logger.warning("small sums of ranks are NCCL's: GPUs can't open each other's memory")
        return None
    memory, addresses = opened
    return PeerSums(OneShotSum(group.rank, addresses, device, max_polls=max_polls), memory)


def open_memory(group: Group, device: torch.device, nbytes: int) -> tuple[PeerMemory, list[int]] | None:
    """Return memory of this rank, and where that of all ranks is; None on all ranks where one can't have it."""
    devices = [int(each) for each in group.everybodys(torch.tensor([device.index], device=device))]
    memory = _tried(lambda: _allocated(nbytes, device.index, devices))
    handles = _handles(group, device, memory)
    addresses = None
    if memory is not None and all(handles):
        addresses = _tried(lambda: memory.addresses(group.rank, handles))
    agreed = group.everybodys(torch.tensor([int(addresses is not None)], device=device))
    if memory is None or addresses is None or not all(map(int, agreed)):
        _give_back(group, device, memory)
        return None
    return memory, addresses


def _give_back(group: Group, device: torch.device, memory: PeerMemory | None) -> None:
    """Free what this rank has, once no other one has it open. All ranks call it."""
    if memory is not None:
        _tried(memory.close_peers)
    group.everybodys(torch.zeros(1, device=device))
    if memory is not None:
        _tried(memory.close)


def _allocated(nbytes: int, own: int, devices: Sequence[int]) -> PeerMemory:
    for device in devices:
        if device != own and not has_native_atomics(own, device):
            raise PeerMemoryError(f"GPU {own} has no atomic operations on GPU {device}: there is no NVLink")
    if len({*devices}) < len(devices):
        raise PeerMemoryError("ranks share a GPU")
    return PeerMemory(nbytes)


def _handles(group: Group, device: torch.device, memory: PeerMemory | None) -> list[bytes]:
    """Return every rank's handle; an empty one of those that have none."""
    shown = bytes([0]) * (1 + HANDLE_NBYTES) if memory is None else bytes([1]) + memory.handle
    all_of_them = group.everybodys(torch.tensor(list(shown), dtype=torch.uint8, device=device))
    found = [bytes(each.tolist()) for each in all_of_them]
    return [each[1:] if each[0] else b"" for each in found]


def _tried(attempt: Callable[[], T]) -> T | None:
    try:
        return attempt()
    except (PeerMemoryError, OSError) as error:
        logger.warning("no sums by peers' memory: %s", error)
        return None
