from __future__ import annotations

from dataclasses import replace

import pytest
from worker_facts import facts

from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.router.choose.estimates import WorkerSpeed
from diptych.router.choose.fits import Curve
from diptych.router.console.fleet.pool_signals import num_wanted, pool_signals
from diptych.router.console.fleet.worker_facts import WorkerFacts
from diptych.router.console.state import PoolSignal
from diptych.v1.bootstrap_pb2 import WorkerLoad
from diptych.v1.worker_pb2 import WorkerStatus

SPEED = WorkerSpeed(prefill=Curve(0.0, 1e-3))


def prefill(number: int, waiting_tokens: int, busy: float | None = None, pool: str = "") -> WorkerFacts:
    status = None if busy is None else WorkerStatus(prefill_busy=busy)
    load = WorkerLoad(waiting_tokens=waiting_tokens, total_pages=100, free_pages=80)
    return facts(number, Role.PREFILL, load=load, record={"pool": pool}, speed=SPEED, status=status)


def decode(number: int, free_pages: int, num_running: int = 4, num_ungranted: int = 0) -> WorkerFacts:
    load = WorkerLoad(
        free_pages=free_pages,
        total_pages=100,
        num_running=num_running,
        num_waiting=num_ungranted,
        num_ungranted=num_ungranted,
    )
    return facts(number, Role.DECODE, load=load, speed=SPEED)


def words(*workers: WorkerFacts) -> str:
    (signal,) = pool_signals(workers).values()
    return signal["words"]


def test_pools_are_told_by_role_and_name() -> None:
    pools = pool_signals([prefill(1, 2000), prefill(2, 0), prefill(3, 0, pool="fast"), decode(4, 50)])
    assert pools["prefill"] == PoolSignal(
        role="prefill",
        num_workers=2,
        num_ready=2,
        queue_s=1.0,
        kv_share=0.2,
        weight=None,
        words="queue 1.0 s a worker: with 1 of 2 workers it would be below 10.0 s, too",
    )
    assert list(pools) == ["decode", "prefill", "prefill fast"]


def test_declared_pools_tell_their_weights() -> None:
    pools = pool_signals(
        [prefill(1, 0, pool="new"), prefill(2, 0, pool="old"), decode(3, 0)], {"new": 5.0, "old": 95.0}
    )
    assert {name: pool["weight"] for name, pool in pools.items()} == {
        "decode": None,
        "prefill new": 5.0,
        "prefill old": 95.0,
    }


def test_a_queue_above_its_target_asks_for_workers() -> None:
    assert words(prefill(1, 24_000)) == "queue 24.0 s a worker: above 10.0 s more workers help, here 2"


def test_prompts_that_wait_for_pages_of_decode_are_no_queue() -> None:
    worker = prefill(1, 24_000)
    worker.reported.blocked_tokens = 24_000
    assert words(worker) == "enough workers: queue 0.0 s a worker (up to 10.0 s)"


def test_busy_workers_are_kept_although_nothing_waits() -> None:
    busy = [prefill(1, 0, 0.65), prefill(2, 0, 0.75)]
    expected = "enough workers: queue 0.0 s a worker (up to 10.0 s), computing prompts 70% a worker (up to 70%)"
    assert words(*busy) == expected
    assert words(prefill(1, 0, 0.9)) == "computing prompts 90% a worker: above 70% more workers help, here 1"


def test_a_decode_pool_is_scaled_by_memory_with_what_waits_for_it() -> None:
    assert words(decode(1, 30)) == "enough workers: KV demand 70% a worker (up to 80%)"
    full = decode(1, 10, num_running=4, num_ungranted=4)
    assert words(full) == "KV demand 180% a worker: above 80% more workers help, here 2"


def test_a_unified_pool_runs_out_of_either() -> None:
    load = WorkerLoad(waiting_tokens=1000, free_pages=5, total_pages=100)
    unified = facts(1, Role.UNIFIED, load=load, speed=SPEED)
    assert words(unified) == "KV demand 95% a worker: above 80% more workers help, here 1"


@pytest.mark.parametrize("status", [None, WorkerStatus(prefill_busy=0.9)])
@pytest.mark.parametrize("role", WORKER_ROLES.values())
def test_a_pool_of_every_role_has_words_whether_or_not_its_workers_tell_how_busy_they_are(
    role: Role, status: WorkerStatus | None
) -> None:
    load = WorkerLoad(total_pages=100, free_pages=100)
    signal = pool_signals([facts(1, role, load=load, speed=SPEED, status=status)])[role.value]
    assert (signal["role"], signal["num_ready"]) == (role.value, 1)
    assert ("90% a worker: above 70%" in signal["words"]) is (status is not None and role is not Role.DECODE)


def test_an_encode_pool_is_scaled_by_how_busy_its_workers_are() -> None:
    load = WorkerLoad(total_pages=100, free_pages=100)
    busy = facts(1, Role.ENCODE, load=load, speed=SPEED, status=WorkerStatus(prefill_busy=0.9))
    assert words(busy) == "encoding images 90% a worker: above 70% more workers help, here 1"
    assert words(replace(busy, status=None)) == "its workers have told nothing yet that it is scaled by"


def test_a_pool_in_which_nobody_is_ready_says_why() -> None:
    starting = [facts(n, Role.PREFILL, record={"state": State.STARTING, "not_ready": "no link"}) for n in (1, 2)]
    signal = pool_signals(starting)["prefill"]
    assert (signal["num_ready"], signal["queue_s"], signal["words"]) == (0, None, "none of 2 is ready: no link")


def test_only_ready_workers_count() -> None:
    leaving = replace(prefill(2, 90_000), view=replace(prefill(2, 0).view, state=State.DRAINING))
    signal = pool_signals([prefill(1, 10_000), leaving])["prefill"]
    assert (signal["num_workers"], signal["num_ready"], signal["queue_s"]) == (2, 1, 10.0)


@pytest.mark.parametrize(
    ("ratio", "num_ready", "expected"),
    [(1.05, 4, 4), (0.95, 4, 4), (1.2, 4, 5), (2.0, 3, 6), (0.5, 4, 2), (0.0, 4, 1), (0.85, 1, 1)],
)
def test_it_takes_as_many_workers_as_the_formula_says(ratio: float, num_ready: int, expected: int) -> None:
    assert num_wanted(ratio, num_ready) == expected
