"""Tokens go to the GPUs that have their experts, and what those make of them comes back: by stores into peers' memory.

For ranks that have tokens of their own and whole experts. A token goes once to each rank that has some of its experts,
whatever their number, to a place that nobody else writes: so nothing is counted, and nobody is asked for room. (DeepEP
does so for few tokens.) All ranks have room for as many tokens in a step, `bound`, and make the same calls in turn,
`dispatch` and `combine`, on one stream each.

Inboxes need no second set. Who dispatches again has combined, for which it needed everybody's results, so all have
computed what was dispatched; and who combines again has everybody's next tokens, so all have read what was combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.collectives.meeting import MAX_POLLS, flags_nbytes, give_up, meet
from diptych.kernels.gpu.grid import power_of_two

PROGRAMS: Final = 128  # on all ranks, whatever the tokens: each meets those of its number
VECTOR_NBYTES: Final = 16  # what one thread stores at once
NUM_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """What is exchanged, and where in each rank's memory it comes to: flags, experts and shares, tokens, results."""

    num_ranks: int
    num_experts: int  # rank r has those from r * num_experts // num_ranks on
    experts_per_token: int
    size: int  # numbers of a token, of which as many rows of 16 bytes are whole
    itemsize: int
    max_tokens: int  # of a rank in a step

    @property
    def flags_nbytes(self) -> int:
        """The bytes of both meetings."""
        return 2 * flags_nbytes(self.num_ranks, PROGRAMS)

    @property
    def row_nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def num_places(self) -> int:
        return self.num_ranks * self.max_tokens

    @property
    def routes_nbytes(self) -> int:
        """The bytes of experts, int32, or of shares, float32."""
        return -(-self.num_places * self.experts_per_token * 4 // VECTOR_NBYTES) * VECTOR_NBYTES

    @property
    def tokens_at(self) -> int:
        return self.flags_nbytes + 2 * self.routes_nbytes

    @property
    def results_at(self) -> int:
        return self.tokens_at + self.num_places * self.row_nbytes

    @property
    def memory_nbytes(self) -> int:
        """What each rank opens to the others; it holds zeros at first."""
        return self.results_at + self.num_places * self.row_nbytes


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens of all ranks for the experts of this one, until the next `dispatch`: `num_ranks * bound` places.

    In a place without a token `chosen` is nobody's everywhere, and `x` is what was there before.
    """

    x: Tensor  # [places, size]
    chosen: Tensor  # int32 [places, experts_per_token]: of this rank's experts, from 0; as many as it has: nobody's
    shares: Tensor  # float32, the same; 0 where nobody is chosen


class ExpertExchange:
    """One rank's exchanges. `memory` and the peers' must outlive it and all graphs that have recorded its calls."""

    def __init__(
        self,
        rank: int,
        shape: ExchangeShape,
        memory: Tensor,
        addresses: Sequence[int],
        *,
        max_polls: int = MAX_POLLS,
        traps: bool = True,
    ) -> None:
        """`memory`: uint8 `[shape.memory_nbytes]`, this rank's; `addresses`: of all ranks', here. See `OneShotSum`."""
        assert shape.row_nbytes % VECTOR_NBYTES == 0, shape
        assert memory.shape == (shape.memory_nbytes,), (memory.shape, shape.memory_nbytes)
        self.late = torch.zeros(1, dtype=torch.int32, device=memory.device)  # programs that gave up
        self._rank = rank
        self._shape = shape
        self._memory = memory
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._calls = torch.zeros(2, PROGRAMS, dtype=torch.int32, device=memory.device)
        self._max_polls = max_polls
        self._traps = traps

    def dispatch(self, x: Tensor, chosen: Tensor, shares: Tensor, bound: int) -> Received:
        """Send this rank's tokens `x`, `[num_tokens, size]`, to the ranks of their experts; return what came here.

        `chosen`, int32, and `shares`, float32, are `[num_tokens, experts_per_token]`; `bound`, the same on all ranks,
        is not below anybody's `num_tokens`.
        """
        shape = self._shape
        self._check(x, chosen, bound)
        assert (shares.shape, shares.dtype) == (chosen.shape, torch.float32), (shares.shape, shares.dtype)
        places = shape.num_ranks * bound
        with torch.cuda.device_of(x):
            dispatch_kernel[(PROGRAMS,)](
                x,
                chosen,
                shares,
                len(x),
                bound,
                self._addresses,
                self._rank,
                self._calls[0],
                self.late,
                self._max_polls,
                ROUTES=shape.routes_nbytes,
                ROUTES_AT=shape.flags_nbytes,
                TOKENS_AT=shape.tokens_at,
                **self._constants(),
                num_warps=NUM_WARPS,
            )
        routes = [
            self._part(shape.flags_nbytes + which * shape.routes_nbytes, places * shape.experts_per_token * 4)
            for which in range(2)
        ]
        return Received(
            x=self._part(shape.tokens_at, places * shape.row_nbytes).view(x.dtype).view(places, shape.size),
            chosen=routes[0].view(torch.int32).view(places, shape.experts_per_token),
            shares=routes[1].view(torch.float32).view(places, shape.experts_per_token),
        )

    def combine(self, results: Tensor, received: Received, chosen: Tensor, out: Tensor) -> None:
        """Send what this rank's experts made of each place, `results`, back; `out` is the sum for each token of `x`.

        Numbers are added up in float32, in the order of ranks. `chosen` is as in `dispatch`, `results` as `received.x`;
        rows without a token are not read.
        """
        bound = len(results) // self._shape.num_ranks
        self._check(out, chosen, bound)
        assert results.shape == received.x.shape, (results.shape, received.x.shape)
        assert (results.dtype, results.is_contiguous()) == (out.dtype, True), results.dtype
        with torch.cuda.device_of(out):
            combine_kernel[(PROGRAMS,)](
                results,
                received.chosen,
                chosen,
                out,
                len(out),
                bound,
                self._addresses,
                self._rank,
                self._calls[1],
                self.late,
                self._max_polls,
                FLAGS_AT=self._shape.flags_nbytes // 2,
                RESULTS_AT=self._shape.results_at,
                **self._constants(),
                num_warps=NUM_WARPS,
            )

    def _check(self, x: Tensor, chosen: Tensor, bound: int) -> None:
        shape = self._shape
        assert len(x) <= bound <= shape.max_tokens, (len(x), bound, shape.max_tokens)
        assert x.shape[1:] == (shape.size,), (x.shape, shape)
        assert x.element_size() == shape.itemsize, (x.dtype, shape)
        assert (chosen.shape, chosen.dtype) == ((len(x), shape.experts_per_token), torch.int32), chosen.dtype
        assert all(each.is_contiguous() for each in (x, chosen))

    def _part(self, start: int, nbytes: int) -> Tensor:
        return self._memory[start : start + nbytes]

    def _constants(self) -> dict[str, int | bool]:
        shape = self._shape
        return {
            "SIZE": shape.size,
            "COLUMNS": power_of_two(shape.size),
            "CHOICES": shape.experts_per_token,
            "ROUTE": power_of_two(shape.experts_per_token),
            "EXPERTS": shape.num_experts,
            "RANKS": shape.num_ranks,
            "NUM_PLACES": PROGRAMS,
            "TRAPS": self._traps,
        }


@triton.jit(do_not_specialize=["num_tokens", "bound", "rank", "max_polls"])
def dispatch_kernel(
    x,
    chosen,
    shares,
    num_tokens,
    bound,
    addresses,
    rank,
    calls,
    late,
    max_polls,
    ROUTES: tl.constexpr,  # bytes between experts and shares
    ROUTES_AT: tl.constexpr,
    TOKENS_AT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of 2 that is not below it
    CHOICES: tl.constexpr,
    ROUTE: tl.constexpr,  # the same of choices
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    call = tl.load(calls + tl.program_id(0)) + 1
    column, choice = tl.arange(0, COLUMNS), tl.arange(0, ROUTE)
    token = tl.program_id(0)
    while token < bound:
        there = (choice < CHOICES) & (token < num_tokens)
        experts = tl.load(chosen + token * CHOICES + choice, mask=there, other=-1)
        weights = tl.load(shares + token * CHOICES + choice, mask=there, other=0.0)
        inside = (column < SIZE) & (token < num_tokens)
        row = tl.load(x + token.to(tl.int64) * SIZE + column, mask=inside, other=0.0)
        place = (rank * bound + token).to(tl.int64)
        for step in tl.static_range(RANKS):  # the first is this rank itself
            peer = (rank + step) % RANKS
            base = tl.load(addresses + peer)
            first, end = peer * EXPERTS // RANKS, (peer + 1) * EXPERTS // RANKS
            own = tl.where((experts >= first) & (experts < end), experts - first, end - first)
            weight = tl.where(own < end - first, weights, 0.0)
            routes = (base + ROUTES_AT + place * (CHOICES * 4)).to(tl.pointer_type(tl.int32))
            tl.store(routes + choice, own, mask=choice < CHOICES)
            tl.store(
                (base + ROUTES_AT + ROUTES + place * (CHOICES * 4)).to(tl.pointer_type(tl.float32)) + choice,
                weight,
                mask=choice < CHOICES,
            )
            if tl.sum((own < end - first).to(tl.int32), axis=0) > 0:
                inbox = tl.multiple_of((base + TOKENS_AT).to(x.dtype), 16)
                tl.store(inbox + place * SIZE + column, row, mask=column < SIZE)
        token += tl.num_programs(0)
    missing = meet(addresses, 0, rank, call, max_polls, RANKS, NUM_PLACES)
    if missing == 0:
        tl.store(calls + tl.program_id(0), call)
    else:
        give_up(late, missing, TRAPS)


@triton.jit(do_not_specialize=["num_tokens", "bound", "rank", "max_polls"])
def combine_kernel(
    results,
    received,  # experts of the places here
    chosen,  # of this rank's own tokens
    out,
    num_tokens,
    bound,
    addresses,
    rank,
    calls,
    late,
    max_polls,
    FLAGS_AT: tl.constexpr,
    RESULTS_AT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROUTE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    call = tl.load(calls + tl.program_id(0)) + 1
    column, choice = tl.arange(0, COLUMNS), tl.arange(0, ROUTE)
    num_own = (rank + 1) * EXPERTS // RANKS - rank * EXPERTS // RANKS
    token = tl.program_id(0)
    while token < bound:
        for step in tl.static_range(1, RANKS):
            source = (rank + step) % RANKS
            place = (source * bound + token).to(tl.int64)
            experts = tl.load(received + place * CHOICES + choice, mask=choice < CHOICES, other=EXPERTS)
            if tl.sum((experts < num_own).to(tl.int32), axis=0) > 0:
                inbox = tl.multiple_of((tl.load(addresses + source) + RESULTS_AT).to(results.dtype), 16)
                row = tl.load(results + place * SIZE + column, mask=column < SIZE)
                back = (rank * bound + token).to(tl.int64) * SIZE
                tl.store(inbox + back + column, row, mask=column < SIZE)
        token += tl.num_programs(0)
    missing = meet(addresses, FLAGS_AT, rank, call, max_polls, RANKS, NUM_PLACES)
    if missing == 0:
        inbox = tl.multiple_of((tl.load(addresses + rank) + RESULTS_AT).to(results.dtype), 16)
        token = tl.program_id(0)
        while token < num_tokens:
            experts = tl.load(chosen + token * CHOICES + choice, mask=choice < CHOICES, other=-1)
            total = tl.zeros((COLUMNS,), tl.float32)
            for source in tl.static_range(RANKS):
                first, end = source * EXPERTS // RANKS, (source + 1) * EXPERTS // RANKS
                is_there = tl.sum(((experts >= first) & (experts < end)).to(tl.int32), axis=0) > 0
                size = tl.where(is_there, SIZE, 0)
                at = (source * bound + token).to(tl.int64) * SIZE
                if source == rank:
                    total += tl.load(results + at + column, mask=column < size, other=0.0).to(tl.float32)
                else:
                    came = tl.load(inbox + at + column, mask=column < size, other=0.0, cache_modifier=".cg")
                    total += came.to(tl.float32)
            row = out + token.to(tl.int64) * SIZE + column
            tl.store(row, total.to(out.dtype.element_ty), mask=column < SIZE)
            token += tl.num_programs(0)
        tl.store(calls + tl.program_id(0), call)
    else:
        give_up(late, missing, TRAPS)
