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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.engine.models.arithmetic.ops import Experts
from diptych.engine.models.expert_ranks import ExpertRanks, PeerExchange
from diptych.engine.models.ranks import Ranks
from diptych.engine.values.expert_placement import ExpertPlacement
from diptych.kernels.expert_places import ExpertTable

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


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """Implements `Experts`."""

    experts: Experts  # of this rank
    places: Places
    ranks: ExpertRanks
    sharing: Ranks  # those that have the same tokens
    layer: int
    is_last: bool  # in the last layer, which computes fewer tokens
    by_peers: ByPeers | None = None

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        """A step on GPUs may have rows behind those of its round: they are nobody's, and get 0."""
        most = self._most_rows(len(x))
        first = self.sharing.rank * most
        ours = slice(first, first + most)
        self.ranks.count(self.layer, chosen[ours])
        if self.by_peers is not None and 0 < most <= self.by_peers.exchange.most_rows:
            if self.sharing.size > 1 or len(out) > most:
                out.zero_()
            self._by_peers(self.by_peers, x[ours], chosen[ours], shares[ours], (most, first), out[ours])
            return
        out.zero_()
        ranks, places = self.places.find(chosen[ours])
        own, result = Sent(x[ours], ranks, places, shares[ours]), out[ours]
        if self.ranks.round is not None and most <= PADDED_ROWS:
            self._padded(own, most, result)
        else:
            self._counted(own, result)

    def _most_rows(self, num_rows: int) -> int:
        """Return how many rows a rank sends at most: the same on all."""
        common, padded = self.ranks.round, self.ranks.padded_rows
        if common is not None:
            num_rows = common.num_rows(is_last=self.is_last)
            if padded is not None and not self.is_last:
                num_rows = padded
        return -(-num_rows // self.sharing.size)

    def _by_peers(
        self, peers: ByPeers, x: Tensor, chosen: Tensor, shares: Tensor, rows: tuple[int, int], out: Tensor
    ) -> None:
        num_tokens = self.ranks.num_tokens(is_last=self.is_last)
        received = peers.exchange.dispatch(x, chosen, shares, peers.table, num_tokens, *rows)
        results = torch.empty_like(received.x)
        self.experts.forward(received.x, received.chosen, received.shares, results)
        peers.exchange.combine(results, received, out)

    def _padded(self, own: Sent, num_rows: int, out: Tensor) -> None:
        size, rank = self.ranks.size, self.ranks.rank
        own_places = [torch.where(own.ranks == each, own.places, -1) for each in range(size)]
        packed = own.packed(torch.stack(own_places, 1).flatten(1), num_rows)
        received = self.ranks.all_gather(packed)
        x, places, shares = own.unpacked(received, size)
        num_chosen = shares.shape[1]
        results = self._compute(x, places[:, rank * num_chosen : (rank + 1) * num_chosen], shares)
        equal = [num_rows] * size
        back = self.ranks.exchange(results, equal, equal).view(size, num_rows, -1)
        for each in back[:, : len(out)]:
            out.add_(each)

    def _counted(self, own: Sent, out: Tensor) -> None:
        size = self.ranks.size
        rows = [(own.ranks == each).any(1).nonzero()[:, 0] for each in range(size)]
        num_sent = [len(each) for each in rows]
        num_received = self.ranks.num_sent_to_us(num_sent)
        parts = [
            own.at(each).packed(torch.where(own.ranks[each] == rank, own.places[each], -1), len(each))
            for rank, each in enumerate(rows)
        ]
        received = self.ranks.exchange(torch.cat(parts), num_sent, num_received)
        results = self._compute(*own.unpacked(received, 1))
        back = self.ranks.exchange(results, num_received, num_sent)
        for each, result in zip(rows, torch.split(back, num_sent), strict=True):
            out[each] += result

    def _compute(self, x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Return what our experts make of rows. A place of -1 is another rank's, or nobody's."""
        results = torch.empty_like(x)
        if len(x):
            is_ours = places >= 0
            own = places.where(is_ours, self.places.num_own).long()
            self.experts.forward(x, own, shares.where(is_ours, 0), results)
        return results


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
