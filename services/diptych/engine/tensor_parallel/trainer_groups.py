"""Process groups with a trainer, which broadcasts tensors: by torch.distributed, gloo between CPUs, NCCL between GPUs.

A group is made as trainers make theirs (SGLang's and vLLM's `init_custom_process_group`): the trainer is its rank 0 and
holds the store; each rank of ours is a member, and gets whole tensors, of which it takes its part. It stands beside the
group in which ranks compute. Who knows the store's address may join: it belongs into a network of trainers and workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import numpy as np

from diptych.common.errors import ConfigError, NotFound, Unavailable
from diptych.kernels.quantized import Array

JOIN_TIMEOUT: Final = timedelta(minutes=2)
DTYPES: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a trainer's group meets."""

    name: str
    host: str
    port: int
    first_rank: int  # in the group, of our rank 0
    world_size: int
    backend: str  # "gloo" or "nccl"


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that a trainer is going to broadcast."""

    name: str
    dtype: str  # of `DTYPES`
    shape: tuple[int, ...]

    def blank(self) -> Array:
        """Return zeros of its type and shape, which take no memory; bfloat16 as the uint16 of its bits."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.name} is of {self.dtype!r}: {', '.join(DTYPES)} are taken")
        kind = np.uint16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        return np.broadcast_to(np.zeros((), kind), self.shape)


class TrainerGroups(Protocol):
    """The groups that one rank is in. One thread uses it."""

    def join(self, address: GroupAddress) -> None:
        """Wait until all of a group are there. Raises `Unavailable`, and `ConfigError` for what can't be joined."""
        ...

    def check(self, name: str) -> None:
        """Raise `NotFound` unless it was joined."""
        ...

    def leave(self, name: str) -> None:
        """Raises `NotFound`."""
        ...

    def receive(self, name: str, tensors: Sequence[Announced]) -> Iterator[tuple[str, Array]]:
        """Yield tensors in the order in which the trainer broadcasts them. Raises `NotFound`, `Unavailable`."""
        ...


class NoGroups:
    """Implements `TrainerGroups` where nothing is computed with."""

    def join(self, address: GroupAddress) -> None:
        raise ConfigError("a simulated model takes no tensors")

    def check(self, name: str) -> None:
        raise NotFound(f"there is no group {name!r}")

    def leave(self, name: str) -> None:
        raise NotFound(f"there is no group {name!r}")

    def receive(self, name: str, tensors: Sequence[Announced]) -> Iterator[tuple[str, Array]]:
        raise NotFound(f"there is no group {name!r}")


class TorchGroups:
    """Implements `TrainerGroups` for the rank `rank`, whose model is on `device`."""

    def __init__(self, rank: int, device: Any) -> None:
        self._rank = rank
        self._device = device
        self._groups: dict[str, Any] = {}

    def join(self, address: GroupAddress) -> None:
        if address.name in self._groups:
            raise ConfigError(f"the group {address.name!r} was joined before: leave it first")
        if (address.backend == "nccl") != (self._device.type == "cuda"):
            raise ConfigError(
                f"backend {address.backend!r} is not for {self._device.type}: gloo is for CPUs, nccl for GPUs"
            )
        try:
            self._groups[address.name] = joined(address, address.first_rank + self._rank)
        except (RuntimeError, ValueError, OSError) as error:
            raise Unavailable(f"the group {address.name!r} did not come together: {error}") from None

    def check(self, name: str) -> None:
        self._group(name)

    def leave(self, name: str) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self._group(name))
        del self._groups[name]

    def receive(self, name: str, tensors: Sequence[Announced]) -> Iterator[tuple[str, Array]]:
        import torch
        import torch.distributed as dist

        group = self._group(name)
        for wanted in tensors:
            tensor = torch.empty(wanted.shape, dtype=getattr(torch, wanted.dtype), device=self._device)
            try:
                dist.broadcast(tensor, src=0, group=group)
            except RuntimeError as error:
                raise Unavailable(f"{wanted.name} did not come: {error}") from None
            plain = tensor.view(torch.int16) if wanted.dtype == "bfloat16" else tensor
            array = plain.cpu().numpy()
            yield wanted.name, array.view(np.uint16) if wanted.dtype == "bfloat16" else array

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            raise NotFound(f"there is no group {name!r}: join it first; there is: {', '.join(self._groups) or 'none'}")
        return self._groups[name]


def joined(address: GroupAddress, rank: int) -> Any:
    """Do as trainers do. torch has no public function for a group beside another one that was made elsewhere."""
    from torch.distributed.rendezvous import rendezvous

    meeting = f"tcp://{address.host}:{address.port}"
    store, rank, size = next(rendezvous(meeting, rank, address.world_size, timeout=JOIN_TIMEOUT))
    store.set_timeout(JOIN_TIMEOUT)
    return group_beside(store, rank, size, address.backend, address.name, JOIN_TIMEOUT)


def group_beside(store: Any, rank: int, size: int, backend: str, name: str, timeout: timedelta) -> Any:
    """Return a group of processes that is none of a part of the process's own group, once all of it are there."""
    import torch.distributed.distributed_c10d as c10d

    prefixed = c10d.PrefixStore(name, store)
    named, kind = c10d.GroupName(name), c10d.Backend(backend)
    group, _ = c10d._new_process_group_helper(size, rank, [], kind, prefixed, group_name=named, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group
