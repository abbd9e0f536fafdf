"""How ranks add up and collect what they computed.

Every rank calls the same collectives in the same order, because all apply the same log of steps. The order of a sum
depends on shapes alone, so equal inputs give equal bits, and the same ones on every rank.
"""

from __future__ import annotations

import os
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.common.errors import Unavailable
from diptych.engine.models.expert_ranks import ExpertRanks
from diptych.engine.models.ranks import Ranks
from diptych.engine.models.stages import Stages
from diptych.engine.tensor_parallel.meeting import TIMEOUT, Meeting
from diptych.engine.tensor_parallel.pipeline.torch_stages import TorchStages
from diptych.engine.tensor_parallel.proof import PROOF_BYTES, impostors, proof
from diptych.engine.tensor_parallel.sum_rule import sum_rule

if TYPE_CHECKING:  # needs Triton
    from diptych.engine.tensor_parallel.peer_sums import PeerSums

_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables of the libraries; what is set stays
_QUEUED: Final = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"  # stages want their sends one by one
_MULTICAST: Final = "NCCL_NVLS_ENABLE"  # through the NVLink switch: some hosts offer it and fail; 1 turns it on


class Communicator(Ranks, Protocol):
    """The collectives of one rank, beside those of layers."""

    @property
    def stages(self) -> Stages | None:
        """Those of the pipeline; None: our ranks have all layers."""
        ...

    def of_one_stage(self) -> Communicator:
        """Return that of a model which the ranks of our stage have alone."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return every rank's `x` in order on rank 0, None on the others. All must have one shape."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replace `x` by that of rank 0."""
        ...

    def smallest(self, number: int) -> int:
        """Wait for all ranks of all stages; return the smallest of their numbers."""
        ...


class TorchCommunicator:
    """Implements `Communicator` over torch.distributed: gloo between CPUs, NCCL between GPUs.

    In a pipeline all but `smallest` is about the ranks of one stage, which are numbered from 0.
    """

    def __init__(self, rank: int, size: int, meeting: Meeting, device: torch.device, num_stages: int = 1) -> None:
        """Meet the other ranks: `size` of each stage. `rank` is of all of them, stage by stage."""
        prepare_libraries(meeting.interface)
        self.rank = rank % size
        self.size = size
        self._root = rank - self.rank  # rank 0 of the stage, among all
        self._group: Any = None  # the stage's; None: there is one
        self.experts: ExpertRanks | None = None
        self._device = device
        self._rule = sum_rule(device.type, size)
        self._peer_sums: PeerSums | None = None
        backend = _BACKENDS[device.type]
        own_gpu = device if device.type == "cuda" else None
        num_ranks = size * num_stages
        self._may_share_memory = num_ranks // meeting.num_nodes % size == 0  # each stage is on one node
        store = meeting.store(rank, num_ranks)
        dist.init_process_group(backend, None, TIMEOUT, num_ranks, rank, store, device_id=own_gpu)
        if backend == "gloo":  # NCCL's connections show a random number of the store
            check_others(meeting.secret(), rank, num_ranks)
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects now, while the store is there
        self.stages = self._meet_stages(rank, num_stages) if num_stages > 1 else None

    def _meet_stages(self, rank: int, num_stages: int) -> TorchStages:
        """Connect as the ranks of one stage, and with the stages beside it."""
        for stage in range(num_stages) if self.size > 1 else ():
            group = dist.new_group(list(range(stage * self.size, (stage + 1) * self.size)), TIMEOUT)
            self._group = group if stage == rank // self.size else self._group
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        stages = TorchStages(rank, self.size, num_stages)
        stages.meet(self._device)
        return stages

    def of_one_stage(self) -> TorchCommunicator:
        alone = copy(self)
        alone.stages = None
        return alone

    def open_peers(self) -> None:
        """Have small sums made through the memory of peers where GPUs can. All ranks call it at once."""
        if self._device.type == "cuda" and self._may_share_memory:
            from diptych.engine.tensor_parallel.peer_sums import open_peer_sums  # needs Triton

            self._peer_sums = open_peer_sums(self, self._device)

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        return self._rule.scatters(num_tokens, row_nbytes)

    def all_reduce(self, x: Tensor) -> None:
        if self._peer_sums is not None and self._peer_sums.has(x):
            self._peer_sums.one_shot.sum(x)
        else:
            dist.all_reduce(x, group=self._group)

    def all_reduce_add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        if self._peer_sums is None or not self._peer_sums.has(delta):
            return False
        self._peer_sums.one_shot.add_rms_norm(x, delta, weight, eps, out)
        return True

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        """Gloo has none: there all is added up, by what adds up without scattering, so the bits are the same."""
        if self._device.type == "cuda":
            dist.reduce_scatter_tensor(out, x, group=self._group)
        else:
            whole = x.clone()
            dist.all_reduce(whole, group=self._group)
            out.copy_(whole[self.rank * len(out) : (self.rank + 1) * len(out)])

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(out, part, group=self._group)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Between GPUs every rank gets all: NCCL has no gather, and torch's is sends, which graphs are not made for."""
        if self._device.type == "cuda":
            parts = self.everybodys(x)
        else:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.gather(x, parts if self.rank == 0 else None, dst=self._root, group=self._group)
        return parts if self.rank == 0 else None

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x` in order, on all of them. All must have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            dist.broadcast(x, src=self._root, group=self._group)

    def smallest(self, number: int) -> int:
        if self.experts is not None:  # whose steps must be alike
            return self.experts.smallest(number)
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def close(self) -> None:
        """Leave the group. On GPUs the end of the process does it: NCCL would wait for the graphs that captured it."""
        if self._device.type == "cpu":
            dist.destroy_process_group()


def prepare_libraries(interface: str) -> None:
    """Name the network device to the libraries, before they are used first."""
    for variable in _INTERFACES:
        os.environ.setdefault(variable, interface)
    os.environ.setdefault(_MULTICAST, "0")
    os.environ.setdefault(_QUEUED, "0")


def check_others(secret: bytes, rank: int, size: int, group: Any = None) -> None:
    """Raise `Unavailable` if somebody else has the place of a rank, in the process's group or in another one."""
    ours = b"".join(proof(secret, rank, reader) for reader in range(size))
    sent = torch.tensor(list(ours), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    shown = [bytes(part) for part in received.view(size, PROOF_BYTES).tolist()]
    if found := impostors(secret, rank, shown):
        ranks = ", ".join(map(str, found))
        raise Unavailable(f"who connected as rank {ranks} is none: a process that is no rank is at our ports")
