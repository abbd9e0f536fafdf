"""How long an attempt may go on, by the clock of the event loop."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fast_loop import FastLoop

from diptych.common.members.roles import LegKind
from diptych.router.serve.attempt import Attempt, AttemptFailed
from diptych.router.values.progress import WaitBudget
from diptych.router.workers.legs import Work
from diptych.v1 import inference_pb2
from diptych.v1.worker_pb2 import LegOutput, StartLeg

SILENCE_S = 600.0
ROOM = 7


@dataclass
class Worker:
    """A session to a worker that says what it is told to say."""

    receiver: Any = None
    kind: LegKind = LegKind.LOCAL
    aborted: set[int] = field(default_factory=set)

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Work, receiver: Any) -> None:
        self.receiver, self.kind = receiver, kind

    def abort(self, room: int) -> None:
        self.aborted.add(room)

    async def send(self, gaps_s: Sequence[float]) -> None:
        """Give a token after each of the gaps; the last one ends the output, unless there is an infinite gap."""
        for index, gap_s in enumerate(gaps_s):
            await asyncio.sleep(gap_s)
            is_last = index == len(gaps_s) - 1
            reason = inference_pb2.FINISH_REASON_STOP if is_last else inference_pb2.FINISH_REASON_UNSPECIFIED
            self.receiver.receive(
                self.kind, LegOutput(room=ROOM, first_index=index, token_ids=[index], finish_reason=reason)
            )


@dataclass
class Outcome:
    num_tokens: int
    ended_s: float
    failure: str = ""
    aborted: frozenset[int] = frozenset()


def run(gaps_s: Sequence[float], deadline_s: float = math.inf) -> Outcome:
    """Return what comes of a request whose tokens come after such gaps."""

    async def request() -> Outcome:
        loop, worker, tokens, failure = asyncio.get_running_loop(), Worker(), 0, ""
        wait_budget = WaitBudget(deadline_s, SILENCE_S, loop.time())
        legs = {LegKind.LOCAL: (cast(Any, worker), StartLeg())}
        attempt = Attempt(ROOM, legs, b"", Work(1), wait_budget, loop.time)
        speech = asyncio.create_task(worker.send(gaps_s))
        try:
            while True:
                delta = await attempt.next()
                tokens += len(delta.token_ids)
                if delta.finish is not None:
                    break
        except AttemptFailed as failed:
            failure = f"{failed.failure.code.name}: {failed.failure.message}"
        ended_s = loop.time()
        attempt.close()
        speech.cancel()
        return Outcome(tokens, ended_s, failure, frozenset(worker.aborted))

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        return runner.run(request())


def test_an_output_of_which_tokens_keep_coming_may_take_as_long_as_it_takes() -> None:
    assert run([SILENCE_S - 1] * 20) == Outcome(20, 20 * (SILENCE_S - 1))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_an_output_of_which_no_token_came_for_too_long_ends_then(num_tokens: int) -> None:
    outcome = run([500.0] * num_tokens + [SILENCE_S + 100])
    assert (outcome.num_tokens, outcome.aborted) == (num_tokens, frozenset({ROOM}))
    assert outcome.ended_s == pytest.approx(500.0 * num_tokens + SILENCE_S)
    assert outcome.failure == "DEADLINE: no token came for 600 s"


@pytest.mark.parametrize("gaps_s", [[10.0] * 200, [2000.0]])
def test_the_deadline_of_a_client_ends_a_request_whatever_comes_of_it(gaps_s: list[float]) -> None:
    outcome = run(gaps_s, deadline_s=555.0)
    assert outcome.ended_s == pytest.approx(555.0)
    assert (outcome.failure, outcome.aborted) == ("DEADLINE: the request's deadline passed", frozenset({ROOM}))


def test_a_deadline_later_than_the_longest_silence_does_not_allow_more_of_it() -> None:
    assert run([SILENCE_S + 100], deadline_s=3600.0).ended_s == pytest.approx(SILENCE_S)
    assert run([SILENCE_S - 1] * 5, deadline_s=3600.0) == Outcome(5, 5 * (SILENCE_S - 1))


def test_a_token_that_one_attempt_gave_counts_for_the_next_one_too() -> None:
    wait_budget = WaitBudget(math.inf, SILENCE_S, now_s=0.0)
    wait_budget.on_tokens(500.0)
    assert wait_budget.ends_s == 1100.0


def test_an_attempt_is_freed_when_it_has_ended_without_a_search_for_garbage() -> None:
    async def attempt() -> weakref.ref[Attempt]:
        loop, worker = asyncio.get_running_loop(), Worker()
        legs = {LegKind.LOCAL: (cast(Any, worker), StartLeg())}
        attempt = Attempt(ROOM, legs, b"", Work(1), WaitBudget(math.inf, SILENCE_S, loop.time()), loop.time)
        await worker.send([1.0, 1.0])
        assert (await attempt.next()).finish is not None
        attempt.close()
        worker.receiver = None  # as sessions do when a leg has ended
        return weakref.ref(attempt)

    gc.disable()
    try:
        with asyncio.Runner(loop_factory=FastLoop) as runner:
            assert runner.run(attempt())() is None
    finally:
        gc.enable()
