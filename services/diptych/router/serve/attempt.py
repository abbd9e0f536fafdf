"""One try at a request: its legs over one room, merged into one run of tokens. Two legs, or one that is all of it.

The attempt ends when the leg that decodes ended and no token is missing, or with the first failure, which aborts the
other leg at once. Rule: a leg that was started is aborted or has ended by the time `close` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from diptych.common.members.roles import LegKind
from diptych.generation.codec import FINISH_TO_WIRE, logprobs_from_wire
from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.output import FailureCode
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import Delta, Report
from diptych.router.values.progress import WaitBudget
from diptych.router.workers.legs import LegReceiver, Work
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import LegOutput, LegStats, StartLeg

REASON_GRACE_S: Final = 1.0  # a leg that its peer aborted waits this long for the peer's own words

_FINISH: Final[Mapping[int, Finish]] = {FINISH_TO_WIRE[each]: each for each in (Finish.STOP, Finish.LENGTH)}
_CODES: Final = {code.value: code for code in FailureCode}


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive output tokens of one leg."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None = None

    @property
    def end(self) -> int:
        return self.first_index + len(self.token_ids)

    def starting_at(self, index: int) -> Run:
        """Return the part from output `index` on."""
        count = index - self.first_index
        logprobs = None if self.logprobs is None else self.logprobs.span(count, len(self.token_ids))
        return Run(index, self.token_ids[count:], logprobs)


class Merger:
    """Takes runs of tokens in any order and gives them back in theirs, each token once. Pure.

    Rule: prefill gives output token 0, decode the ones after it; a leg that is alone gives all. Two legs arrive over
    two connections, so decode may be first: its tokens are held until token 0 is here. A token that was taken already
    is dropped.

    Tokens are copied out of their runs: a run may be part of a message with those of many requests, which must not
    stay for a client that is slow to take its own.
    """

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # of those
        self._held: list[Run] = []
        self.num_tokens = 0  # ready so far, with those that were taken

    @property
    def has_gap(self) -> bool:
        """A token is missing before some that are held."""
        return bool(self._held)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def accept(self, first_index: int, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> None:
        """Take a run, from output `first_index` on."""
        if first_index == self.num_tokens and not self._held:
            self._make_ready(token_ids, logprobs)
        elif token_ids:
            self._sort_in(Run(first_index, list(token_ids), logprobs))

    def pop(self) -> tuple[list[int], TokenLogprobs | None]:
        """Return the tokens that are next, and their log-probabilities if they have them."""
        ready, self._ready = self._ready, []
        if not self._logprobs:
            return ready, None
        logprobs, self._logprobs = self._logprobs, []
        return ready, join(logprobs)

    def _make_ready(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        self._ready.extend(token_ids)
        self.num_tokens += len(token_ids)
        if logprobs is not None and token_ids:
            self._logprobs.append(logprobs)

    def _sort_in(self, run: Run) -> None:
        self._held.append(run)
        if run.first_index > self.num_tokens:  # so are all that are held
            return
        waiting = []
        for held in sorted(self._held, key=lambda held: held.first_index):
            if held.first_index > self.num_tokens:
                waiting.append(held)
            elif held.end > self.num_tokens:
                rest = held.starting_at(self.num_tokens)
                self._make_ready(rest.token_ids, rest.logprobs)
        self._held = waiting


class Session(Protocol):
    """Whoever computes legs, as an attempt needs it."""

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Work, receiver: LegReceiver) -> None: ...

    def abort(self, room: int) -> None: ...


class AttemptFailed(Exception):
    """The attempt is over; `failure` says why."""

    def __init__(self, failure: LegFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Attempt:
    """The legs of a room. Started by the constructor; `close` it."""

    def __init__(
        self,
        room: int,
        legs: Mapping[LegKind, tuple[Session, StartLeg]],
        prompt: bytes,
        work: Work,
        wait_budget: WaitBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is that of `wait_budget`."""
        self.room = room
        self.stats: dict[LegKind, LegStats] = {}
        self._told: set[LegKind] = set()  # legs that ended well, and said all that they measured
        self._sessions = {kind: session for kind, (session, _) in legs.items()}
        self._loop = asyncio.get_running_loop()
        self._open = set(legs)
        self._merger = Merger()
        self._prompt_logprobs: TokenLogprobs | None = None
        self._finish: Finish | None = None
        self._failure: LegFailure | None = None
        self._suspected: LegFailure | None = None  # the failure, unless the other leg knows better
        self._waiter: asyncio.Future[None] | None = None  # who waits for news
        self._wait_budget = wait_budget
        self._clock = clock
        self._timer = self._call_in_the_end()
        for kind, (session, start) in legs.items():
            session.start(kind, start, prompt, work, self)

    @property
    def prompt_stats(self) -> LegStats | None:
        """What the leg that computes the prompt has measured."""
        return self.stats.get(LegKind.PREFILL, self.stats.get(LegKind.LOCAL))

    def report(self, pair: Pair) -> Report:
        """Return what the legs have measured, as far as they have said it."""
        told = frozenset(self._told)
        return Report(pair, self.room, dict(self.stats), told, told == self._sessions.keys())

    async def next(self) -> Delta:
        """Wait for news and return all of it as one delta. Raises `AttemptFailed`."""
        while not (self._merger.has_ready or self._failure or self._is_complete()):
            await self._news()
        if self._failure and not self._merger.has_ready:
            raise AttemptFailed(self._failure)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        token_ids, logprobs = self._merger.pop()
        return Delta(token_ids, self._finish if self._is_complete() else None, logprobs, prompt_logprobs)

    async def wait_for_prefill_end(self, timeout_s: float) -> None:
        """Wait until the prefill leg's last output, which carries its final stats, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while LegKind.PREFILL in self._open:
                    await self._news()
        except TimeoutError:
            return

    def close(self) -> None:
        """Abort what is still open, unless the request is complete: then prefill is about to end by itself."""
        self._timer.cancel()
        if self._is_complete() and not self._failure:
            return
        for kind in self._open:
            self._sessions[kind].abort(self.room)

    async def _news(self) -> None:
        """Wait until the legs say something. Only the request's own task waits."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # what the legs say

    def receive(self, kind: LegKind, output: LegOutput) -> None:
        if output.HasField("stats"):
            self.stats[kind] = output.stats
        if output.HasField("prompt_logprobs"):
            self._prompt_logprobs = logprobs_from_wire(output.prompt_logprobs)
        logprobs = logprobs_from_wire(output.logprobs) if output.HasField("logprobs") else None
        self._merger.accept(output.first_index, output.token_ids, logprobs)
        if output.token_ids:
            self._wait_budget.on_tokens(self._clock())
        if output.finish_reason or output.HasField("error"):
            self._end(kind, output)
        self._wake()

    def _end(self, kind: LegKind, output: LegOutput) -> None:
        self._open.discard(kind)
        if output.finish_reason not in _FINISH:
            code = _CODES.get(output.error.code, FailureCode.INTERNAL)
            self._fail(LegFailure(kind, code, output.error.message))
        else:
            self._told.add(kind)
            if kind is not LegKind.PREFILL:
                self._finish = _FINISH[output.finish_reason]
        if self._suspected and not self._open:
            self._settle(self._suspected)

    def lose(self, kind: LegKind, reason: str) -> None:
        self._open.discard(kind)
        self._fail(LegFailure(kind, FailureCode.PEER_LOST, reason, session_lost=True))

    def _fail(self, failure: LegFailure) -> None:
        """Take a leg's failure: abort the other leg, and settle on the reason that says most."""
        if failure.leg is LegKind.PREFILL and not self._needs_prefill():
            self._wake()
            return
        if failure.code is FailureCode.ABORTED and self._open:
            self._suspected = failure
            for other in self._open:
                self._sessions[other].abort(self.room)
            self._timer.cancel()
            self._timer = self._loop.call_later(REASON_GRACE_S, self._settle, failure)
            return
        self._settle(failure)

    def _settle(self, failure: LegFailure) -> None:
        """The first reason counts."""
        if self._failure is None and not self._is_complete():
            self._failure = failure
            self.close()
        self._wake()

    def _call_in_the_end(self) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, self._wait_budget.ends_s - self._clock()), self._end_if_it_is_time)

    def _end_if_it_is_time(self) -> None:
        """Something may have come meanwhile: timers are not set anew for each token."""
        now_s = self._clock()
        if now_s < self._wait_budget.ends_s:
            self._timer = self._call_in_the_end()
        else:
            self._settle(LegFailure(LegKind.DECODE, FailureCode.DEADLINE, self._wait_budget.words(now_s)))

    def _needs_prefill(self) -> bool:
        """Once decode has produced a token or has ended, and token 0 is here, prefill has done its part."""
        return self._merger.num_tokens < 1 or (self._merger.num_tokens < 2 and self._finish is None)

    def _is_complete(self) -> bool:
        return self._finish is not None and self._merger.num_tokens > 0 and not self._merger.has_gap


def legs_of(pair: Pair, leg: StartLeg) -> dict[LegKind, tuple[int, StartLeg]]:
    """Return the legs of a pair and who gets them, made of what they have in common."""
    if pair.is_local:
        return {LegKind.LOCAL: (pair.prefill_id, leg)}
    other = StartLeg()
    other.CopyFrom(leg)
    leg.peer_instance_id, other.peer_instance_id = pair.decode_id, pair.prefill_id
    other.sampling.ClearField("prompt_logprobs")  # prefill reports them
    return {LegKind.PREFILL: (pair.prefill_id, leg), LegKind.DECODE: (pair.decode_id, other)}
