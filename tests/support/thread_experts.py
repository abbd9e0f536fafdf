"""Ranks that share experts as threads of one process, on a CPU: by collectives, or as GPUs do by peers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from thread_ranks import Meeting
from torch import Tensor

from diptych.engine.models.expert_ranks import Coming, PeerExchange
from diptych.engine.values.expert_placement import ExpertPlacement, balanced
from diptych.engine.values.rounds import Round
from diptych.kernels.expert_places import ExpertTable, Received


@dataclass
class ThreadExperts:
    """Implements `ExpertRanks` for a thread."""

    rank: int
    meeting: Meeting
    placed: ExpertPlacement | None = None  # of all layers; None: each expert once
    round: Round | None = None
    padded_rows: int | None = None
    exchange_by: PeerExchange | None = None
    most_recorded: int = 0
    num_each: int = 1  # ranks of a scheduler
    counted: list[int] = field(default_factory=list)
    exchanges: str = ""  # s: something was sent, c: something came
    sizes: Tensor = field(default_factory=lambda: torch.full((2,), 1 << 30, dtype=torch.int32))

    @property
    def size(self) -> int:
        return len(self.meeting.brought)

    def begin(self, common: Round) -> None:
        own = common.parts[self.rank // self.num_each]
        self.round, self.padded_rows = common, None
        self.sizes.copy_(torch.tensor([own.num_tokens, own.num_picked]))

    @property
    def late_tokens(self) -> int | None:
        if self.round is None or self.round.halves is None:
            return None
        return self.round.parts[self.rank // self.num_each].late_tokens

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        return self.placed or balanced([1.0] * num_experts, self.size)

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self.placement(layer, num_experts).of_ranks[self.rank]

    def room(self, num_experts: int) -> int:
        return max(map(len, self.placement(0, num_experts).of_ranks))

    def peers(self, width: int, experts_per_token: int, room: int) -> PeerExchange | None:
        return self.exchange_by

    def num_tokens(self, *, is_last: bool) -> Tensor:
        return self.sizes[1:] if is_last else self.sizes[:1]

    def smallest(self, number: int) -> int:
        return min(map(int, self.meeting.exchange(self.rank, torch.tensor(number))))

    def count(self, layer: int, chosen: Tensor) -> None:
        self.counted += chosen.flatten().tolist()

    def all_gather(self, part: Tensor) -> Coming:
        return self._coming(torch.cat(self.meeting.exchange(self.rank, part)))

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        return [int(each[self.rank]) for each in self.meeting.exchange(self.rank, torch.tensor(num_sent))]

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Coming:
        sizes = self.meeting.exchange(self.rank, torch.tensor(num_sent))
        parts = self.meeting.exchange(self.rank, rows)
        got = [torch.split(part, size.tolist())[self.rank] for part, size in zip(parts, sizes, strict=True)]
        assert [len(each) for each in got] == list(num_received)
        return self._coming(torch.cat(got))

    def _coming(self, out: Tensor) -> Coming:
        self.exchanges += "s"

        def wait() -> Tensor:
            self.exchanges += "c"
            return out

        return wait


@dataclass
class ThreadPeers:
    """Implements `PeerExchange` by torch: what `ExpertExchange` does."""

    rank: int
    meeting: Meeting
    room: int
    most_rows: int
    bounds: list[int] = field(default_factory=list)  # of each dispatch

    def dispatch(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        table: ExpertTable,
        num_tokens: Tensor,
        bound: int,
        before: int = 0,
    ) -> Received:
        self.bounds.append(bound)
        count = max(0, min(len(x), bound, int(num_tokens) - before))
        turn = torch.arange(count)[:, None] % table.num_copies[chosen[:count]]
        slots = torch.full((bound, chosen.shape[1]), -1)
        slots[:count] = table.places[chosen[:count], turn].long()
        rows, weights = x.new_full((bound, x.shape[1]), torch.nan), torch.zeros(bound, chosen.shape[1])
        rows[:count], weights[:count] = x[:count], shares[:count].float()
        all_slots, all_rows, all_weights = (
            torch.cat(self.meeting.exchange(self.rank, each)) for each in (slots, rows, weights)
        )
        is_ours = all_slots // self.room == self.rank
        own = torch.where(is_ours, all_slots % self.room, self.room).int()
        asked = torch.zeros(len(x), dtype=torch.int32)
        for rank in range(len(self.meeting.brought)):
            asked[:count] |= (slots[:count] // self.room == rank).any(1).int() << rank
        return Received(all_rows, own, all_weights.where(is_ours, 0), asked)

    def combine(self, results: Tensor, received: Received, out: Tensor) -> None:
        size = len(self.meeting.brought)
        bound, total = len(results) // size, torch.zeros(out.shape)
        for rank, each in enumerate(self.meeting.exchange(self.rank, results)):
            mine = each[self.rank * bound : (self.rank + 1) * bound][: len(out)].float()
            is_asked = (received.asked[: len(mine)] >> rank & 1).bool()[:, None]
            total[: len(mine)] += mine.where(is_asked, 0)
        out.copy_(total)
