"""One try at a request: its legs over one room. Two legs, or one that is all of it. `attempt_legs` says how it ends.

Rule: a leg that was started is aborted or has ended by the time `close` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.router.serve.attempt_legs import REASON_GRACE_S, AttemptLegs
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import Delta, Predicted, Report
from diptych.router.values.progress import WaitBudget
from diptych.router.workers.legs import LegReceiver, Work
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import LEG_KIND_POOL, LegOutput, LegStats, StartLeg


class Session(Protocol):
    """Whoever computes legs, as an attempt needs it."""

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Work, receiver: LegReceiver) -> None: ...

    def abort(self, room: int) -> None: ...

    def tool_called(self, room: int, tool: str) -> None: ...


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
        self.computed_by = 0  # the instance that computes its prompt; 0: nobody said
        self._sessions = {kind: session for kind, (session, _) in legs.items()}
        self._loop = asyncio.get_running_loop()
        self._legs = AttemptLegs(legs, partial(_abort, self._sessions, room))
        self._waiter: asyncio.Future[None] | None = None  # who waits for news
        self._on_news: Callable[[], None] = _nobody  # who hears of it beside
        self._wait_budget = wait_budget
        self._clock = clock
        self._timer = self._call_in_the_end()
        for kind, (session, start) in legs.items():
            session.start(kind, start, prompt, work, self)

    def start_leg(self, kind: LegKind, session: Session, start: StartLeg, prompt: bytes, work: Work) -> None:
        """Start a further leg."""
        self._sessions[kind] = session
        self._legs.begin(kind)
        session.start(kind, start, prompt, work, self)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._legs.merger.num_tokens

    @property
    def has_ended(self) -> bool:
        return self._legs.has_ended

    @property
    def has_failed(self) -> bool:
        return self._legs.failure is not None

    def pop(self) -> Sequence[int]:
        """Return the tokens that `next` would."""
        return self._legs.pop()[0]

    @property
    def ready(self) -> Sequence[int]:
        """The tokens that `next` will return."""
        return self._legs.merger.ready

    def watch(self, on_news: Callable[[], None]) -> None:
        """Have `on_news` called, too, whenever a leg has said something."""
        self._on_news = on_news

    def supersede(self) -> None:
        """Another attempt goes on with the request: this one fails behind the tokens that it has."""
        self._settle(LegFailure(LegKind.DECODE, FailureCode.HANDED_BACK, "another attempt goes on with it"))

    def tool_called(self, tool: str) -> None:
        """Tell all who have the request's KV that it has called a tool."""
        for session in self._sessions.values():
            session.tool_called(self.room, tool)

    @property
    def stats(self) -> Mapping[LegKind, LegStats]:
        """What the legs have measured, as it comes."""
        return self._legs.stats

    @property
    def prompt_stats(self) -> LegStats | None:
        """What the leg that computes the prompt has measured."""
        kinds = (LegKind.PREFILL, LegKind.LOCAL, LegKind.POOL)
        return next((self.stats[kind] for kind in kinds if kind in self.stats), None)

    def predicted(self, num_tokens: int) -> Predicted:
        """Return what came of guesses in its first tokens, so many: all or, where a stop string cuts them off, fewer.

        It cuts off none but those that `next` returned last.
        """
        return self._legs.guessed.within(num_tokens)

    def report(self, pair: Pair) -> Report:
        """Return what the legs have measured, as far as they have said it."""
        told = frozenset(self._legs.told)
        return Report(pair, self.room, dict(self.stats), told, told == self._sessions.keys())

    async def next(self) -> Delta:
        """Wait for news and return all of it as one delta. Raises `AttemptFailed`."""
        legs = self._legs
        while not (legs.merger.has_ready or legs.has_ended):
            await self._news()
        if legs.failure and not legs.merger.has_ready:
            raise AttemptFailed(legs.failure)
        prompt_logprobs, legs.prompt_logprobs = legs.prompt_logprobs, None
        token_ids, logprobs = legs.pop()
        finish, insight = legs.finish if legs.is_complete else None, legs.merger.pop_insight()
        return Delta(token_ids, finish, logprobs, prompt_logprobs, legs.vector, insight)

    async def wait_for_prefill_end(self, timeout_s: float) -> None:
        """Wait until the prefill leg's last output, which carries its final stats, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while LegKind.PREFILL in self._legs.open:
                    await self._news()
        except TimeoutError:
            return

    def close(self) -> None:
        """Abort what is still open, unless the request is complete: then prefill is about to end by itself."""
        self._timer.cancel()
        self._legs.close()

    async def _news(self) -> None:
        """Wait until the legs say something. Only the request's own task waits."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # what the legs say

    def receive(self, kind: LegKind, output: LegOutput) -> None:
        suspected = self._legs.receive(kind, output)
        if suspected is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(REASON_GRACE_S, self._settle, suspected)
        if output.token_ids:
            self._wait_budget.on_tokens(self._clock())
        self._heard()

    def lose(self, kind: LegKind, reason: str) -> None:
        self._legs.lose(kind, reason)
        self._heard()

    def _heard(self) -> None:
        if self._legs.failure is not None:
            self._timer.cancel()
        self._wake()
        self._on_news()

    def _settle(self, failure: LegFailure) -> None:
        self._legs.settle(failure)
        self._heard()

    def _call_in_the_end(self) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, self._wait_budget.ends_s - self._clock()), self._end_if_it_is_time)

    def _end_if_it_is_time(self) -> None:
        """Something may have come meanwhile: timers are not set anew for each token."""
        now_s = self._clock()
        if now_s < self._wait_budget.ends_s:
            self._timer = self._call_in_the_end()
        else:
            self._settle(LegFailure(LegKind.DECODE, FailureCode.DEADLINE, self._wait_budget.words(now_s)))


def _abort(sessions: Mapping[LegKind, Session], room: int, kind: LegKind) -> None:
    sessions[kind].abort(room)


def _nobody() -> None:
    """Nobody hears of it."""


def legs_of(pair: Pair, leg: StartLeg) -> dict[LegKind, tuple[int, StartLeg]]:
    """Return the legs of a pair and who gets them, made of what they have in common."""
    if leg.kind == LEG_KIND_POOL:
        return {LegKind.POOL: (pair.prefill_id, leg)}
    if pair.is_local:
        return {LegKind.LOCAL: (pair.prefill_id, leg)}
    other = StartLeg()
    other.CopyFrom(leg)
    leg.peer_instance_id, other.peer_instance_id = pair.decode_id, pair.prefill_id
    other.sampling.ClearField("prompt_logprobs")  # prefill reports them
    leg.ClearField("prediction")  # decode goes by it
    return {LegKind.PREFILL: (pair.prefill_id, leg), LegKind.DECODE: (pair.decode_id, other)}
