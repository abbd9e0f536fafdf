"""Experts that are spread over ranks of which each has tokens of its own: tokens go to experts, and results back.

Between GPUs that can store to each other's memory, kernels do it (`PeerExchange`): nothing is counted by a host, and
how many rows there are is read on the GPU. Where they can't, and between CPUs, a round has one of two forms, which all
ranks know by its sizes alone:

- *padded*, for few rows: every rank gives its rows to all, as many as the largest has, and gets back as many from each.
  Nothing is counted, so the host waits for nothing.
- *counted*, for many: a row goes to those ranks only which have some of its experts. Ranks first tell each other how
  many rows they send, for which the host waits.

(DeepEP, github.com/deepseek-ai/DeepEP, has the same two under the names low-latency and normal.) What ranks return for
a token is added up in the order of ranks, so of these two its bits do not depend on the form; kernels round once.

Of a scheduler with several ranks each has all of its tokens, and sends its part of them: the sum over them, which is
there anyway, puts the results together.

A journey of tokens has parts (`Journey`), between which the caller may compute something else: by collectives they are
on their way meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.engine.models.arithmetic.ops import Experts
from diptych.engine.models.expert_ranks import Coming, ExpertRanks, PeerExchange
from diptych.engine.models.ranks import Ranks
from diptych.engine.values.expert_placement import ExpertPlacement
from diptych.kernels.expert_places import ExpertTable, Received

PADDED_ROWS: Final = 256  # of a rank: above, what is sent in vain costs more than to count


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where experts of a layer are."""

    ranks: Tensor  # int64 [num_experts, most copies]: of copies that there are not, that of the first
    places: Tensor  # likewise, among the experts of a rank
    num_copies: Tensor  # int64 [num_experts]
    num_own: int  # experts of this rank

    @staticmethod
    def of(placement: ExpertPlacement, rank: int, device: torch.device) -> Places:
        copies = placement.copies()
        most = max(map(len, copies))
        padded = torch.tensor([[*where, *([where[0]] * (most - len(where)))] for where in copies], device=device)
        num_copies = torch.tensor([len(where) for where in copies], device=device)
        ranks, places = padded.unbind(-1)
        return Places(ranks.contiguous(), places.contiguous(), num_copies, len(placement.of_ranks[rank]))

    def table(self, room: int) -> ExpertTable:
        """Return the same as kernels read it, with places for `room` experts on each rank."""
        return ExpertTable((self.ranks * room + self.places).int(), self.num_copies.int())

    def find(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return ranks and places of the experts `chosen`, `[num_rows, experts_per_token]`; rows take turns."""
        turn = torch.arange(len(chosen), device=chosen.device)[:, None] % self.num_copies[chosen]
        return self.ranks[chosen, turn], self.places[chosen, turn]


@dataclass(frozen=True, slots=True, eq=False)
class ByPeers:
    """What tokens of a layer are exchanged by where GPUs open their memory to each other."""

    exchange: PeerExchange
    table: ExpertTable


class Journey(Protocol):
    """Rows of a layer on their way to experts and back. Its parts come in this order, each once."""

    def arrive(self) -> None:
        """Wait until what others sent is here."""
        ...

    def compute(self) -> None:
        """Have our experts compute it."""
        ...

    def send_back(self) -> None:
        """Send the results back."""
        ...

    def end(self) -> None:
        """Wait for the results of our rows, and add them up."""
        ...


def travel(journey: Journey) -> None:
    """Go all the way at once."""
    journey.arrive()
    journey.compute()
    journey.send_back()
    journey.end()


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """Implements `Experts`, and `SentExperts` by journeys whose parts are apart."""

    experts: Experts  # of this rank
    places: Places
    ranks: ExpertRanks
    sharing: Ranks  # those that have the same tokens
    layer: int
    is_last: bool  # in the last layer, which computes fewer tokens
    by_peers: ByPeers | None = None

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        travel(self.begin(x, chosen, shares, out))

    def begin(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> Journey:
        """Send rows of the running round. A step on GPUs may have rows behind them: they are nobody's, and get 0."""
        most = self._most_rows(len(x))
        first = self.sharing.rank * most
        ours = slice(first, first + most)
        self.ranks.count(self.layer, chosen[ours])
        if self.by_peers is not None and 0 < most <= self.by_peers.exchange.most_rows:
            if self.sharing.size > 1 or len(out) > most:
                out.zero_()
            num_tokens = self.ranks.num_tokens(is_last=self.is_last)
            sent = x[ours], chosen[ours], shares[ours], self.by_peers.table, num_tokens, most, first
            return _ByPeers(self, self.by_peers.exchange, self.by_peers.exchange.dispatch(*sent), out[ours])
        out.zero_()
        ranks, places = self.places.find(chosen[ours])
        own, result = Sent(x[ours], ranks, places, shares[ours]), out[ours]
        if self.ranks.round is not None and most <= PADDED_ROWS:
            return _Padded.begin(self, own, most, result)
        return _Counted.begin(self, own, result)

    def _most_rows(self, num_rows: int) -> int:
        """Return how many rows a rank sends at most: the same on all."""
        common, padded = self.ranks.round, self.ranks.padded_rows
        if common is not None:
            num_rows = common.num_rows(is_last=self.is_last)
            if padded is not None and not self.is_last:
                num_rows = padded
        return -(-num_rows // self.sharing.size)

    def compute(self, x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Return what our experts make of rows. A place of -1 is another rank's, or nobody's."""
        results = torch.empty_like(x)
        if len(x):
            is_ours = places >= 0
            own = places.where(is_ours, self.places.num_own).long()
            self.experts.forward(x, own, shares.where(is_ours, 0), results)
        return results


@dataclass(slots=True, eq=False)
class _ByPeers:
    """Implements `Journey`. Kernels wait by themselves, and the way back is one with the sum."""

    spread: SpreadExperts
    exchange: PeerExchange
    received: Received
    out: Tensor
    results: Tensor = field(init=False)

    def arrive(self) -> None: ...

    def compute(self) -> None:
        self.results = torch.empty_like(self.received.x)
        self.spread.experts.forward(self.received.x, self.received.chosen, self.received.shares, self.results)

    def send_back(self) -> None: ...

    def end(self) -> None:
        self.exchange.combine(self.results, self.received, self.out)


@dataclass(slots=True, eq=False)
class _Padded:
    """Implements `Journey`: every rank gives its rows to all."""

    spread: SpreadExperts
    own: Sent
    num_rows: int
    out: Tensor
    coming: Coming  # first what others sent, then what comes back
    received: Tensor = field(init=False)
    results: Tensor = field(init=False)

    @staticmethod
    def begin(spread: SpreadExperts, own: Sent, num_rows: int, out: Tensor) -> _Padded:
        places = [torch.where(own.ranks == each, own.places, -1) for each in range(spread.ranks.size)]
        packed = own.packed(torch.stack(places, 1).flatten(1), num_rows)
        return _Padded(spread, own, num_rows, out, spread.ranks.all_gather(packed))

    def arrive(self) -> None:
        self.received = self.coming()

    def compute(self) -> None:
        size, rank = self.spread.ranks.size, self.spread.ranks.rank
        x, places, shares = self.own.unpacked(self.received, size)
        num_chosen = shares.shape[1]
        self.results = self.spread.compute(x, places[:, rank * num_chosen : (rank + 1) * num_chosen], shares)

    def send_back(self) -> None:
        equal = [self.num_rows] * self.spread.ranks.size
        self.coming = self.spread.ranks.exchange(self.results, equal, equal)

    def end(self) -> None:
        back = self.coming().view(self.spread.ranks.size, self.num_rows, -1)
        for each in back[:, : len(self.out)]:
            self.out.add_(each)


@dataclass(slots=True, eq=False)
class _Counted:
    """Implements `Journey`: a row goes to those ranks only which have some of its experts."""

    spread: SpreadExperts
    own: Sent
    rows: Sequence[Tensor]  # that each rank is sent
    num_received: Sequence[int]
    out: Tensor
    coming: Coming
    received: Tensor = field(init=False)
    results: Tensor = field(init=False)

    @staticmethod
    def begin(spread: SpreadExperts, own: Sent, out: Tensor) -> _Counted:
        ranks = spread.ranks
        rows = [(own.ranks == each).any(1).nonzero()[:, 0] for each in range(ranks.size)]
        num_sent = [len(each) for each in rows]
        num_received = ranks.num_sent_to_us(num_sent)
        parts = [
            own.at(each).packed(torch.where(own.ranks[each] == rank, own.places[each], -1), len(each))
            for rank, each in enumerate(rows)
        ]
        coming = ranks.exchange(torch.cat(parts), num_sent, num_received)
        return _Counted(spread, own, rows, num_received, out, coming)

    def arrive(self) -> None:
        self.received = self.coming()

    def compute(self) -> None:
        self.results = self.spread.compute(*self.own.unpacked(self.received, 1))

    def send_back(self) -> None:
        self.coming = self.spread.ranks.exchange(self.results, self.num_received, [len(each) for each in self.rows])

    def end(self) -> None:
        back = torch.split(self.coming(), [len(each) for each in self.rows])
        for each, result in zip(self.rows, back, strict=True):
            self.out[each] += result


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Rows, and the experts they are for."""

    x: Tensor  # [num_rows, width]
    ranks: Tensor  # int64 [num_rows, experts_per_token]
    places: Tensor  # likewise
    shares: Tensor  # likewise, of `x`'s type

    def at(self, rows: Tensor) -> Sent:
        return Sent(self.x[rows], self.ranks[rows], self.places[rows], self.shares[rows])

    def packed(self, places: Tensor, num_rows: int) -> Tensor:
        """Return `num_rows` rows of bytes: hidden states, shares, `places`. Rows behind ours are for nobody."""
        narrow = places.to(torch.int32)
        parts = (self.x, self.shares, narrow)
        width = sum(part.shape[1] * part.element_size() for part in parts)
        out = self.x.new_zeros(num_rows, width, dtype=torch.uint8)
        out[len(self.x) :, -4 * places.shape[1] :] = 255  # -1
        out[: len(self.x)] = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        return out

    def unpacked(self, rows: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, places (for so many ranks) and shares of rows that `packed` made on any rank."""
        dtype, nbytes = self.x.dtype, self.x.element_size()
        widths = [self.x.shape[1] * nbytes, self.shares.shape[1] * nbytes, self.shares.shape[1] * num_ranks * 4]
        x, shares, places = torch.split(rows, widths, 1)
        return (
            x.contiguous().view(dtype),
            places.contiguous().view(torch.int32),
            shares.contiguous().view(dtype),
        )
