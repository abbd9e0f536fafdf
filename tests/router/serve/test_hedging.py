"""With `--hedge-after-s` a request whose first token does not come has a second attempt; without it never."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.router.serve.attempt import AttemptFailed
from diptych.router.serve.hedging import MAX_SAVED, Hedging, first_answer
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import Delta
from diptych.v1 import worker_pb2

Cluster = Any


def all_started(cluster: Cluster) -> int:
    return sum(len(worker.started) for worker in cluster.workers)


def test_a_share_of_requests_may_have_a_second_attempt() -> None:
    hedging, spent = Hedging(0.5), []
    for _ in range(100):
        hedging.count()
        spent.append(hedging.spend())
    assert 5 <= sum(spent) <= 6
    for _ in range(10_000):
        hedging.count()
    assert sum(hedging.spend() for _ in range(100)) == MAX_SAVED


def test_it_is_off_by_default() -> None:
    assert not Hedging(0.0).is_on


@pytest.fixture
def slow(start_cluster: Any, hang: Any) -> Cluster:
    """Each worker of the first pair says nothing to its first request."""
    cluster = start_cluster(2, 2, hedge_after_s=0.05)
    cluster.prefill(0).faults, cluster.decode(0).faults = [hang(0)], [hang(0)]
    return cluster


def test_whoever_answers_first_serves_and_the_other_is_aborted(slow: Cluster) -> None:
    texts = [slow.complete("p")["text"] for _ in range(3)]  # one of them begins on the first pair
    assert texts == ["Hello!"] * 3
    slow.wait_for(lambda: not any(worker.running for worker in slow.workers))
    silent = slow.prefill(0), slow.decode(0)
    assert [worker.started[0].room in worker.aborted for worker in silent] == [True, True]
    assert (
        "diptych_router_hedges_total 0.0" not in slow.get("/metrics")[1]
    )  # a busy machine may be late with others, too


def test_a_second_attempt_that_fails_leaves_the_first_one(slow: Cluster, fail: Any) -> None:
    for worker in slow.workers:
        worker.faults = [*worker.faults, fail(0, worker_pb2.ERROR_CODE_RETRACTED)]
    slow.prefill(1).faults = slow.decode(1).faults = [fail(0, worker_pb2.ERROR_CODE_RETRACTED)]
    connection = slow.connect()
    slow.wait_for(lambda: all_started(slow) == 4)
    for worker in slow.workers:
        slow.release(worker)
    assert b"Hello!" in connection.getresponse().read()
    connection.close()


def test_a_client_that_leaves_takes_both_attempts_with_it(slow: Cluster, hang: Any) -> None:
    slow.prefill(1).faults, slow.decode(1).faults = [hang(0)], [hang(0)]
    connection = slow.connect()
    slow.wait_for(lambda: all_started(slow) == 4)
    connection.close()
    slow.wait_for(lambda: all(worker.aborted for worker in slow.workers))


def test_without_another_pair_there_is_no_second_attempt(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(hedge_after_s=0.01)
    cluster.prefill().faults = [hang(0)]
    connection = cluster.connect()
    cluster.wait_until(lambda: all_started(cluster) == 2)
    cluster.release(cluster.prefill())
    assert b"Hello!" in connection.getresponse().read()
    connection.close()
    assert all_started(cluster) == 2


def attempts_of(cluster: Cluster, request_id: str) -> list[dict[str, Any]]:
    (request,) = cluster.router.dispatcher.explanations.find(request_id)["requests"]
    return list(request["attempts"])


def test_an_attempt_that_fails_beside_another_is_blamed_and_told_of(slow: Cluster, hang: Any, fail: Any) -> None:
    slow.prefill(1).faults, slow.decode(1).faults = [hang(0)], [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED)]
    connection = slow.connect(headers={"x-request-id": "both"})
    slow.wait_for(lambda: slow.prefill(1).aborted)
    for worker in slow.workers:
        slow.release(worker)
    assert b"Hello!" in connection.getresponse().read()
    connection.close()
    outcomes = [attempt["outcome"] for attempt in attempts_of(slow, "both")]
    assert outcomes == ["failed: decode leg: TRANSFER_FAILED: told to fail", "stop"]


def test_a_client_that_leaves_ends_the_stories_of_both_attempts(slow: Cluster, hang: Any) -> None:
    slow.prefill(1).faults, slow.decode(1).faults = [hang(0)], [hang(0)]
    connection = slow.connect(headers={"x-request-id": "left"})
    slow.wait_for(lambda: all_started(slow) == 4)
    connection.close()
    slow.wait_until(lambda: [attempt["outcome"] for attempt in attempts_of(slow, "left")] == ["closed"] * 2)


def test_a_second_attempt_may_begin_on_a_worker_that_is_left_alone(start_cluster: Any, hang: Any, fail: Any) -> None:
    cluster = start_cluster(prefill=0, decode=0, unified=2, hedge_after_s=0.05, breaker_failures=1)
    silent, left_alone = cluster.workers
    left_alone.faults = [fail(0, worker_pb2.ERROR_CODE_INTERNAL)]
    while left_alone.faults:
        cluster.post("/v1/completions", {"prompt": "p", "max_tokens": 2000})
    silent.faults = [hang(0) for _ in range(2)]
    assert cluster.complete("p")["text"] == "Hello!"


class Silent:
    """An attempt that says something when it is told to."""

    def __init__(self, says: asyncio.Event, outcome: Delta | AttemptFailed) -> None:
        self._says = says
        self._outcome = outcome
        self.closed = asyncio.Event()

    async def next(self) -> Delta:
        await self._says.wait()
        if isinstance(self._outcome, AttemptFailed):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        self.closed.set()


def test_an_attempt_that_fails_in_the_moment_of_the_answer_leaves_no_failure_unheard() -> None:
    unheard: list[Any] = []

    async def race() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context["message"]))
        says, failure = asyncio.Event(), LegFailure(LegKind.DECODE, FailureCode.RETRACTED, "no pages")
        answering, failing = Silent(says, Delta((1,), None)), Silent(says, AttemptFailed(failure))

        async def second() -> Any:
            asyncio.get_running_loop().call_soon(says.set)
            return failing

        attempt, outcome = await first_answer(answering, 0.0, second, lambda attempt, failure: None)  # type: ignore[arg-type]
        assert outcome == Delta((1,), None)
        assert attempt is answering  # type: ignore[comparison-overlap]

    for _ in range(20):  # which of the two is looked at first is left to chance
        asyncio.run(race())
    assert unheard == []


def test_a_client_that_leaves_as_an_answer_comes_takes_who_answered_with_it() -> None:
    async def test() -> None:
        never, at_once = asyncio.Event(), asyncio.Event()
        at_once.set()
        first, second = Silent(never, Delta((), None)), Silent(at_once, Delta((1,), None))

        async def start_second() -> Any:
            return second

        racing = asyncio.ensure_future(first_answer(first, 0.0, start_second, lambda *_: None))  # type: ignore[arg-type]
        await first.closed.wait()  # the second one has won, and the first one is being ended
        racing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await racing
        assert second.closed.is_set()

    asyncio.run(test())
