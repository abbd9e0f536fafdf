"""The ranks of all schedulers that share experts, by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.communicator import check_others, prepare_libraries
from diptych.engine.tensor_parallel.meeting import TIMEOUT, FileMeeting
from diptych.engine.tensor_parallel.trainer_groups import group_beside
from diptych.engine.values.expert_placement import ExpertPlacement, balanced
from diptych.engine.values.rounds import Round

_NAME: Final = "experts"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


class ExpertGroup:
    """Implements `ExpertRanks`. It stands beside the group in which the ranks of one scheduler add up."""

    def __init__(
        self, place: SharedExperts, rank: int, tp: int, device: torch.device, num_redundant: int, *, counts: bool
    ) -> None:
        """Wait until all ranks of all schedulers are there.

        `num_redundant`: copies of experts beside one of each. `counts` what experts do, for `load_of_layers`.
        """
        self._num_redundant = num_redundant
        self._counts = counts
        self._chosen: dict[int, Tensor] = {}  # by layer: how often each expert was chosen here, int64
        self.placements: dict[int, ExpertPlacement] = {}  # by layer
        self.rank, self.size = place.rank(rank, tp), place.size(tp)
        self.round: Round | None = None
        self._device = device
        meeting = FileMeeting(Path(place.folder) / _NAME)
        prepare_libraries(meeting.interface)
        store, backend = meeting.store(self.rank, self.size), _BACKENDS[device.type]
        self._group: Any = group_beside(store, self.rank, self.size, backend, _NAME, TIMEOUT)
        if backend == "gloo":
            check_others(meeting.secret(), self.rank, self.size, self._group)
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)  # NCCL connects now

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        if layer not in self.placements:
            alike = [1.0] * num_experts
            self.placements[layer] = balanced(alike, self.size, self._num_redundant)
            self._chosen[layer] = torch.zeros(num_experts, dtype=torch.long, device=self._device)
        return self.placements[layer]

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self.placement(layer, num_experts).of_ranks[self.rank]

    def count(self, layer: int, chosen: Tensor) -> None:
        if self._counts:
            flat = chosen.flatten()
            self._chosen[layer].index_add_(0, flat, torch.ones_like(flat))

    def load_of_layers(self) -> dict[int, list[int]]:
        """Return how often all ranks have chosen each expert since the last call, by layer. All ranks call it."""
        loads = {}
        for layer, own in sorted(self._chosen.items()):
            dist.all_reduce(own, group=self._group)
            loads[layer] = list(map(int, own.tolist()))
            own.zero_()
        return loads

    def all_gather(self, part: Tensor) -> Tensor:
        out = part.new_empty(self.size * len(part), part.shape[1])
        if self._device.type == "cuda":
            dist.all_gather_into_tensor(out, part, group=self._group)
        else:
            dist.all_gather(list(out.chunk(self.size)), part, group=self._group)
        return out

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        sent = torch.tensor(num_sent, device=self._device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return list(map(int, received.tolist()))

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(num_received), rows.shape[1])
        dist.all_to_all_single(out, rows, list(num_received), list(num_sent), group=self._group)
        return out

    def smallest(self, number: int) -> int:
        """Wait for all; return the smallest of their numbers."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return int(numbers)

    def close(self) -> None:
        """Leave. On GPUs the end of the process does it."""
        if self._device.type == "cpu":
            dist.destroy_process_group(self._group)


class LoneCommunicator:
    """Implements `Communicator` of a scheduler with one rank, which shares experts with others."""

    rank: Final = 0
    size: Final = 1
    stages: Final = None

    def __init__(self, experts: ExpertGroup) -> None:
        self.experts = experts

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        return False

    def all_reduce(self, x: Tensor) -> None:
        pass

    def all_reduce_add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        return False

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x]

    def broadcast(self, x: Tensor) -> None:
        pass

    def smallest(self, number: int) -> int:
        return self.experts.smallest(number)
