"""Tokens go to the GPUs that have their experts, and what those make of them comes back: by stores into peers' memory.

For ranks that have tokens of their own and whole experts. A token goes once to each rank that has some of its experts,
whatever their number, to a place that nobody else writes: so nothing is counted, and nobody is asked for room. (DeepEP
does so for few tokens.) All ranks have room for as many tokens in a step, `bound`, and make the same calls in turn,
`dispatch` and `combine`, on one stream each. How many tokens there are is read on the GPU: so a graph of one `bound`
serves any number up to it, none included.

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

from diptych.kernels.expert_places import ExpertTable, Received
from diptych.kernels.gpu.collectives.meeting import MAX_POLLS, flags_nbytes, give_up, meet, tell, wait_for
from diptych.kernels.gpu.grid import power_of_two

MOST_PROGRAMS: Final = 256  # that have flags
VECTOR_NBYTES: Final = 16  # what one thread stores at once
ANY_NUMBER: Final = 1 << 30  # of tokens: as many as there are rows


@dataclass(frozen=True, slots=True)
class Form:
    """How a call is divided: the same on all ranks. Each program meets those of its number."""

    programs: int  # at most
    num_warps: int
    rows: int = 1  # that `combine` takes at once
    segment: int = 1 << 20  # such takes, after which `combine` tells, and adds up what came before


DISPATCH: Final = Form(128, 8)
COMBINE: Final = Form(256, 8, segment=4)


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """What is exchanged, and where in each rank's memory it comes to: flags, experts and shares, tokens, results."""

    num_ranks: int
    room: int  # places for experts on each rank
    experts_per_token: int
    size: int  # numbers of a token, of which as many rows of 16 bytes are whole
    itemsize: int
    max_tokens: int  # of a rank in a step

    @property
    def flags_nbytes(self) -> int:
        """The bytes of both meetings."""
        return 2 * flags_nbytes(self.num_ranks, MOST_PROGRAMS)

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


class ExpertExchange:
    """One rank's exchanges. `memory` and the peers' must outlive it and all graphs that have recorded its calls."""

    def __init__(
        self,
        rank: int,
        shape: ExchangeShape,
        memory: Tensor,
        addresses: Sequence[int],
        *,
        dispatch: Form = DISPATCH,
        combine: Form = COMBINE,
        max_polls: int = MAX_POLLS,
        traps: bool = True,
    ) -> None:
        """`memory`: uint8 `[shape.memory_nbytes]`, this rank's; `addresses`: of all ranks', here. See `OneShotSum`."""
        assert shape.row_nbytes % VECTOR_NBYTES == 0, shape
        assert memory.shape == (shape.memory_nbytes,), (memory.shape, shape.memory_nbytes)
        assert max(dispatch.programs, combine.programs) <= MOST_PROGRAMS, (dispatch, combine)
        self.shape = shape
        self.most_rows = shape.max_tokens
        self.late = torch.zeros(1, dtype=torch.int32, device=memory.device)  # programs that gave up
        self._rank = rank
        self._memory = memory
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._calls = torch.zeros(2, MOST_PROGRAMS, dtype=torch.int32, device=memory.device)
        self._dispatch, self._combine = dispatch, combine
        self._max_polls = max_polls
        self._traps = traps

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
        """Send this rank's tokens `x`, `[num_rows, size]`, to the ranks of their experts; return what came here.

        `chosen`, int32 or int64, and `shares` are `[num_rows, experts_per_token]`. `num_tokens`, int32 `[1]`, is read
        on the GPU: of so many tokens, `before` are none of these rows; rows behind them are nobody's. `bound`, the
        same on all ranks, is neither 0 nor below anybody's number of tokens.
        """
        shape, num_rows = self.shape, min(len(x), bound)
        self._check(x, bound)
        assert chosen.shape == shares.shape == (len(x), shape.experts_per_token), (chosen.shape, shares.shape)
        assert chosen.is_contiguous(), chosen.stride()
        assert shares.is_contiguous(), shares.stride()
        places = shape.num_ranks * bound
        asked = torch.empty(len(x), dtype=torch.int32, device=x.device)
        with torch.cuda.device_of(x):
            dispatch_kernel[(min(self._dispatch.programs, bound),)](
                x,
                chosen,
                shares,
                table.places,
                table.num_copies,
                asked,
                num_tokens,
                before,
                num_rows,
                bound,
                self._addresses,
                self._rank,
                self._calls[0],
                self.late,
                self._max_polls,
                ROUTES=shape.routes_nbytes,
                ROUTES_AT=shape.flags_nbytes,
                TOKENS_AT=shape.tokens_at,
                MOST=table.places.shape[1],
                **self._constants(),
                num_warps=self._dispatch.num_warps,
            )
        routes = [
            self._part(shape.flags_nbytes + which * shape.routes_nbytes, places * shape.experts_per_token * 4)
            for which in range(2)
        ]
        return Received(
            x=self._part(shape.tokens_at, places * shape.row_nbytes).view(x.dtype).view(places, shape.size),
            chosen=routes[0].view(torch.int32).view(places, shape.experts_per_token),
            shares=routes[1].view(torch.float32).view(places, shape.experts_per_token),
            asked=asked,
        )

    def combine(self, results: Tensor, received: Received, out: Tensor) -> None:
        """Send what this rank's experts made of each place, `results`, back; `out` is the sum for each row of `x`.

        Numbers are added up in float32, in the order of ranks; of a row that is nobody's the sum is 0. `results` is as
        `received.x`; rows without a token are not read.
        """
        bound = len(results) // self.shape.num_ranks
        self._check(out, bound)
        assert results.shape == received.x.shape, (results.shape, received.x.shape)
        assert (results.dtype, results.is_contiguous()) == (out.dtype, True), results.dtype
        assert len(received.asked) == len(out), (received.asked.shape, out.shape)
        form = self._combine
        with torch.cuda.device_of(out):
            combine_kernel[(min(form.programs, bound),)](
                results,
                received.chosen,
                received.asked,
                out,
                min(len(out), bound),
                bound,
                self._addresses,
                self._rank,
                self._calls[1],
                self.late,
                self._max_polls,
                FLAGS_AT=self.shape.flags_nbytes // 2,
                RESULTS_AT=self.shape.results_at,
                ROWS=form.rows,
                SEGMENT=form.segment,
                **self._constants(),
                num_warps=form.num_warps,
            )

    def _check(self, x: Tensor, bound: int) -> None:
        shape = self.shape
        assert 0 < bound <= shape.max_tokens, (bound, shape.max_tokens)
        assert x.shape[1:] == (shape.size,), (x.shape, shape)
        assert x.element_size() == shape.itemsize, (x.dtype, shape)
        assert x.is_contiguous(), x.stride()

    def _part(self, start: int, nbytes: int) -> Tensor:
        return self._memory[start : start + nbytes]

    def _constants(self) -> dict[str, int | bool]:
        shape = self.shape
        return {
            "SIZE": shape.size,
            "COLUMNS": power_of_two(shape.size),
            "CHOICES": shape.experts_per_token,
            "ROUTE": power_of_two(shape.experts_per_token),
            "ROOM": shape.room,
            "RANKS": shape.num_ranks,
            "NUM_PLACES": MOST_PROGRAMS,
            "TRAPS": self._traps,
        }


@triton.jit(do_not_specialize=["before", "num_rows", "bound", "rank", "max_polls"])
def dispatch_kernel(
    x,
    chosen,
    shares,
    places,
    num_copies,
    asked,
    num_tokens,
    before,
    num_rows,
    bound,
    addresses,
    rank,
    calls,
    late,
    max_polls,
    ROUTES: tl.constexpr,  # bytes between experts and shares
    ROUTES_AT: tl.constexpr,
    TOKENS_AT: tl.constexpr,
    MOST: tl.constexpr,  # copies of an expert
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of 2 that is not below it
    CHOICES: tl.constexpr,
    ROUTE: tl.constexpr,  # the same of choices
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    call = tl.load(calls + tl.program_id(0)) + 1
    column, choice = tl.arange(0, COLUMNS), tl.arange(0, ROUTE)
    end = tl.minimum(num_rows, tl.load(num_tokens) - before)
    token = tl.program_id(0)
    while token < bound:
        there = (choice < CHOICES) & (token < end)
        experts = tl.load(chosen + token * CHOICES + choice, mask=there, other=0)
        weights = tl.load(shares + token * CHOICES + choice, mask=there, other=0.0).to(tl.float32)
        turn = token % tl.load(num_copies + experts, mask=there, other=1)
        found = tl.load(places + experts * MOST + turn, mask=there, other=-1)
        row = tl.load(x + token.to(tl.int64) * SIZE + column, mask=(column < SIZE) & (token < end), other=0.0)
        place = (rank * bound + token).to(tl.int64)
        ranks = 0
        for step in tl.static_range(RANKS):  # the first is this rank itself
            peer = (rank + step) % RANKS
            base = tl.load(addresses + peer)
            own = tl.where((found >= peer * ROOM) & (found < (peer + 1) * ROOM), found - peer * ROOM, ROOM)
            routes = (base + ROUTES_AT + place * (CHOICES * 4)).to(tl.pointer_type(tl.int32))
            tl.store(routes + choice, own, mask=choice < CHOICES)
            tl.store(
                (base + ROUTES_AT + ROUTES + place * (CHOICES * 4)).to(tl.pointer_type(tl.float32)) + choice,
                tl.where(own < ROOM, weights, 0.0),
                mask=choice < CHOICES,
            )
            if tl.sum((own < ROOM).to(tl.int32), axis=0) > 0:
                ranks += 1 << peer
                inbox = tl.multiple_of((base + TOKENS_AT).to(x.dtype), 16)
                tl.store(inbox + place * SIZE + column, row, mask=column < SIZE)
        if token < num_rows:
            tl.store(asked + token, ranks)
        token += tl.num_programs(0)
    missing = meet(addresses, 0, rank, call, max_polls, RANKS, NUM_PLACES)
    if missing == 0:
        tl.store(calls + tl.program_id(0), call)
    else:
        give_up(late, missing, TRAPS)


@triton.jit(do_not_specialize=["num_rows", "bound", "rank", "max_polls"])
def combine_kernel(
    results,
    received,  # experts of the places here
    asked,  # by this rank's own tokens
    out,
    num_rows,
    bound,
    addresses,
    rank,
    calls,
    late,
    max_polls,
    FLAGS_AT: tl.constexpr,
    RESULTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROUTE: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    """Segment by segment: what comes of one is added up while the next one's results are on their way."""
    call = tl.load(calls + tl.program_id(0))
    stride = tl.num_programs(0) * ROWS
    start, begun, count, missing = tl.program_id(0) * ROWS, tl.program_id(0) * ROWS, 0, 0
    while start < bound:
        _send_back(
            results,
            received,
            start,
            bound,
            addresses,
            rank,
            RESULTS_AT,
            ROWS,
            SIZE,
            COLUMNS,
            CHOICES,
            ROUTE,
            ROOM,
            RANKS,
        )
        start += stride
        count += 1
        if count % SEGMENT == 0:
            call += 1
            tell(addresses, FLAGS_AT, rank, call, RANKS, NUM_PLACES)
            if count > SEGMENT:
                polls = tl.where(missing == 0, max_polls, 0)  # who has waited in vain does not again
                missing += wait_for(addresses, FLAGS_AT, rank, call - 1, polls, RANKS, NUM_PLACES)
                if missing == 0:
                    end = begun + SEGMENT * stride
                    _add_up(
                        results,
                        asked,
                        out,
                        begun,
                        tl.minimum(end, num_rows),
                        stride,
                        bound,
                        addresses,
                        rank,
                        RESULTS_AT,
                        ROWS,
                        SIZE,
                        COLUMNS,
                        RANKS,
                    )
                    begun = end
    if count % SEGMENT != 0:
        call += 1
        tell(addresses, FLAGS_AT, rank, call, RANKS, NUM_PLACES)
    polls = tl.where(missing == 0, max_polls, 0)
    missing += wait_for(addresses, FLAGS_AT, rank, call, polls, RANKS, NUM_PLACES)
    if missing == 0:
        _add_up(
            results,
            asked,
            out,
            begun,
            num_rows,
            stride,
            bound,
            addresses,
            rank,
            RESULTS_AT,
            ROWS,
            SIZE,
            COLUMNS,
            RANKS,
        )
        tl.store(calls + tl.program_id(0), call)
    else:
        give_up(late, missing, TRAPS)


@triton.jit
def _send_back(
    results,
    received,
    start,
    bound,
    addresses,
    rank,
    RESULTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROUTE: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Store the results of the tokens from `start` on, of each other rank, to that rank."""
    token, column, choice = start + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, ROUTE)
    inside = (token < bound)[:, None]
    for step in tl.static_range(1, RANKS):
        source = (rank + step) % RANKS
        place = (source * bound + token).to(tl.int64)[:, None]
        experts = tl.load(
            received + place * CHOICES + choice[None, :], mask=inside & (choice < CHOICES)[None, :], other=ROOM
        )
        is_ours = (tl.sum((experts < ROOM).to(tl.int32), axis=1) > 0)[:, None] & (column < SIZE)[None, :]
        row = tl.load(results + place * SIZE + column[None, :], mask=is_ours, other=0.0)
        inbox = tl.multiple_of((tl.load(addresses + source) + RESULTS_AT).to(results.dtype), 16)
        back = (rank * bound + token).to(tl.int64)[:, None] * SIZE
        tl.store(inbox + back + column[None, :], row, mask=is_ours)


@triton.jit
def _add_up(
    results,
    asked,
    out,
    start,
    end,
    stride,
    bound,
    addresses,
    rank,
    RESULTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add up, in the order of ranks, what they made of this one's tokens: `ROWS` of each `stride` up to `end`."""
    inbox = tl.multiple_of((tl.load(addresses + rank) + RESULTS_AT).to(results.dtype), 16)
    column = tl.arange(0, COLUMNS)
    inside = (column < SIZE)[None, :]
    while start < end:
        token = start + tl.arange(0, ROWS)
        there = token < end
        ranks = tl.load(asked + token, mask=there, other=0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for source in tl.static_range(RANKS):
            at = (source * bound + token).to(tl.int64)[:, None] * SIZE + column[None, :]
            is_there = ((ranks >> source) & 1 == 1)[:, None] & inside
            if source == rank:
                total += tl.load(results + at, mask=is_there, other=0.0).to(tl.float32)
            else:
                total += tl.load(inbox + at, mask=is_there, other=0.0, cache_modifier=".cg").to(tl.float32)
        row = out + token.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(row, total.to(out.dtype.element_ty), mask=there[:, None] & inside)
        start += stride
