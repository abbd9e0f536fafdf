"""The ranks of all schedulers that share experts, by torch.distributed: gloo between CPUs, NCCL between GPUs.

Beside it GPUs open memory to each other, through which kernels exchange tokens (`peer_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.engine.models.expert_ranks import Coming, PeerExchange
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.communicator import check_others, prepare_libraries
from diptych.engine.tensor_parallel.meeting import TIMEOUT, FileMeeting
from diptych.engine.tensor_parallel.trainer_groups import group_beside
from diptych.engine.values.expert_placement import ExpertPlacement, balanced
from diptych.engine.values.rounds import Round

_NAME: Final = "experts"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_ALL_ROWS: Final = 1 << 30  # more than a step has


class ExpertGroup:
    """Implements `ExpertRanks`. It stands beside the group in which the ranks of one scheduler add up."""

    def __init__(
        self,
        place: SharedExperts,
        rank: int,
        tp: int,
        device: torch.device,
        dtype: torch.dtype,
        num_redundant: int,
        *,
        counts: bool,
        opens_memory: bool,
        overlaps: bool = False,
    ) -> None:
        """Wait until all ranks of all schedulers are there.

        `dtype`: of hidden states. `num_redundant`: copies of experts beside one of each. `counts` what experts do, for
        `load_of_layers`. `opens_memory` of a GPU to the other ranks, see `peers`. `overlaps`: something is computed
        while tokens are on their way; else a GPU's stream exchanges them itself, which takes the host less.
        """
        self._num_redundant = num_redundant
        self._counts = counts
        self._opens_memory = opens_memory
        self._overlaps = overlaps or device.type == "cpu"
        self._chosen: dict[int, Tensor] = {}  # by layer: how often each expert was chosen here, int64
        self.placements: dict[int, ExpertPlacement] = {}  # by layer
        self.rank, self.size = place.rank(rank, tp), place.size(tp)
        self.round: Round | None = None
        self.padded_rows: int | None = None
        self._scheduler = place.scheduler
        self._sizes = torch.full((2,), _ALL_ROWS, dtype=torch.int32, device=device)  # of tokens, and of the last layer
        self._exchanges: dict[tuple[int, int, int], PeerExchange | None] = {}  # by what is exchanged
        self._device, self._dtype = device, dtype
        meeting = FileMeeting(Path(place.folder) / _NAME)
        prepare_libraries(meeting.interface)
        store, backend = meeting.store(self.rank, self.size), _BACKENDS[device.type]
        self._group: Any = group_beside(store, self.rank, self.size, backend, _NAME, TIMEOUT)
        if backend == "gloo":
            check_others(meeting.secret(), self.rank, self.size, self._group)
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)  # NCCL connects now

    def begin(self, common: Round) -> None:
        """Begin a round; queue that kernels find the sizes of our part."""
        self.round, self.padded_rows, own = common, None, common.parts[self._scheduler]
        if self._exchanges:
            self._sizes.view(torch.int64).fill_(own.num_tokens | own.num_picked << 32)  # both at once: one launch

    @property
    def late_tokens(self) -> int | None:
        if self.round is None or self.round.halves is None:
            return None
        return self.round.parts[self._scheduler].late_tokens

    def num_tokens(self, *, is_last: bool) -> Tensor:
        return self._sizes[1:] if is_last else self._sizes[:1]

    def room(self, num_experts: int) -> int:
        return -(-(num_experts + self._num_redundant) // self.size)

    def peers(self, width: int, experts_per_token: int, room: int) -> PeerExchange | None:
        if self._device.type != "cuda" or not self._opens_memory:
            return None
        wanted = width, experts_per_token, room
        if wanted not in self._exchanges:
            from diptych.engine.tensor_parallel.sharing.peer_exchange import open_exchange  # needs Triton

            self._exchanges[wanted] = open_exchange(self, self._device, self._dtype, *wanted)
        return self._exchanges[wanted]

    @property
    def most_recorded(self) -> int:
        """Placements that change would leave graphs behind whose experts are elsewhere."""
        if self._counts:
            return 0
        return min((0 if each is None else each.most_rows for each in self._exchanges.values()), default=0)

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x` in order. All must have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts

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

    def all_gather(self, part: Tensor) -> Coming:
        out = part.new_empty(self.size * len(part), part.shape[1])
        if self._device.type == "cuda":
            work = dist.all_gather_into_tensor(out, part, group=self._group, async_op=self._overlaps)
        else:
            work = dist.all_gather(list(out.chunk(self.size)), part, group=self._group, async_op=self._overlaps)
        return Travelling(work, part, out)

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        sent = torch.tensor(num_sent, device=self._device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return list(map(int, received.tolist()))

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Coming:
        out = rows.new_empty(sum(num_received), rows.shape[1])
        sizes = list(num_received), list(num_sent)
        work = dist.all_to_all_single(out, rows, *sizes, group=self._group, async_op=self._overlaps)
        return Travelling(work, rows, out)

    def smallest(self, number: int) -> int:
        """Wait for all; return the smallest of their numbers."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return int(numbers)

    def close(self) -> None:
        """Leave. On GPUs the end of the process does it."""
        if self._device.type == "cpu":
            dist.destroy_process_group(self._group)


@dataclass(frozen=True, slots=True, eq=False)
class Travelling:
    """Implements `Coming`. gloo has threads of its own for it, and NCCL a stream, which ours waits for when asked."""

    work: Any  # None: our own stream does it
    sent: Tensor  # that nobody may free before
    out: Tensor

    def __call__(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.out


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

    def of_one_stage(self) -> LoneCommunicator:
        return self

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x]

    def broadcast(self, x: Tensor) -> None:
        pass

    def smallest(self, number: int) -> int:
        return self.experts.smallest(number)
