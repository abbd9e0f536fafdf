"""What `diptych planner` makes of what it reads: plans, said once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from diptych.cli.planning.config import PlannerConfig, sizes_of
from diptych.cli.planning.sources import counts_of
from diptych.cli.planning.watcher import Seen, Watcher, _queued, serving_floor
from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role as Served
from diptych.engine.values.step_model import H200_LLAMA_8B
from diptych.planner.counters import Counts, Lens
from diptych.planner.pools.cluster import Cluster, Pool, WorkerPod
from diptych.planner.pools.orders import orders
from diptych.planner.values import NO_WORKERS, Goal, Plan, Sizes, Why, WorkerState
from diptych.router.metrics import RouterMetrics
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    INSTANCE_STATE_STARTING,
    ROLE_DECODE,
    ROLE_ENCODE,
    ROLE_PREFILL,
    ROLE_UNIFIED,
    Instance,
    InstanceState,
    Role,
    WorkerLoad,
)

CONFIG = PlannerConfig(gpus=8, least=("unified=1",))
UNIFIED = ("unified", "default")


def worker(
    number: int,
    role: Role = ROLE_UNIFIED,
    state: InstanceState = INSTANCE_STATE_READY,
    num_running: int = 0,
    pod: str = "",
) -> Instance:
    load = WorkerLoad(num_running=num_running, total_pages=50_000, free_pages=50_000)
    return Instance(instance_id=number, role=role, state=state, load=load, pod=pod)


def seen(now_s: float, listed: list[Instance], counts: Counts | None = Counts(), **more: Any) -> Seen:  # noqa: B008
    return Seen(now_s, tuple(listed), {"router:1": counts}, **more)


def load(number: int, rate: float, prompt: int) -> Counts:
    """What a router has counted after so many rounds."""
    came = number * 15 * rate
    return Counts(came, came, came * prompt, 0, came * 100, 2, came)


def test_a_load_that_is_too_much_is_seen_planned_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    with caplog.at_level(logging.INFO, "diptych.cli.planning.watcher"):
        for number in range(10):  # in the first two minutes the load is that of cold caches
            plan = watcher.round(seen(1000.0 + 15 * number, [worker(1)], load(number, 6.0, 8000))).plan
    assert plan.sizes.total > 1
    assert Why.GROWS in plan.why
    told = [each.message for each in caplog.records if each.name == "diptych.cli.planning.watcher"]
    assert len(told) == len(set(told)) <= 4


def test_missing_routers_and_loads_are_said() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    silent = Instance(instance_id=2, role=ROLE_UNIFIED, state=INSTANCE_STATE_READY)
    plan = watcher.round(seen(0.0, [worker(1), silent], None)).plan
    assert plan.sizes == Sizes(both=2)
    assert plan.why == {Why.LOAD_UNKNOWN}
    unsaid = Watcher(replace(CONFIG, gpus=0), H200_LLAMA_8B)
    assert Why.BUDGET_UNKNOWN in unsaid.round(Seen(0.0, (worker(1),), {})).plan.why


def test_roles_and_states_are_those_of_the_members() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    there = [worker(1, ROLE_PREFILL), worker(2, ROLE_DECODE, num_running=3), worker(3, state=INSTANCE_STATE_DRAINING)]
    for now_s in (0.0, 15.0):
        scene = watcher.round(seen(now_s, there))
    assert {each.worker_id: each.since_s for each in scene.workers} == {1: 0.0, 2: 0.0, 3: 0.0}
    turned = watcher.round(seen(30.0, there, flipping={1: Served.DECODE}))
    assert [each.role for each in turned.workers] == [Served.DECODE, Served.DECODE, Served.UNIFIED]


def test_a_plan_that_nobody_carries_out_stays_the_same() -> None:
    watcher, sizes = Watcher(CONFIG, H200_LLAMA_8B), []
    for number in range(40):
        listed = [worker(each) for each in range(1, 7)]
        plan = watcher.round(seen(1000.0 + 15 * number, listed, load(number, 0.5, 2000))).plan
        sizes.append(plan.sizes.total)
    assert len(set(sizes[25:])) == 1
    assert sizes[-1] < 6
    assert Why.CHANGED_BY_OTHERS not in plan.why


def test_who_goes_has_least_that_nobody_else_has_and_who_is_not_known_is_taken_for_the_mean() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    listed, known = [worker(each) for each in (1, 2, 3, 4)], {1: 900, 2: 100, 3: 500}
    for number in range(40):
        scene = watcher.round(seen(1000.0 + 15 * number, listed, load(number, 0.1, 2000), only_here_pages=known))
    assert {each.worker_id: each.only_here_tokens for each in scene.workers} == {1: 14400, 2: 1600, 3: 8000, 4: 8000}
    assert scene.plan.leaving == (2,)


def test_a_goal_that_is_missed_although_it_should_be_kept_is_noticed() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    whys: set[Why] = set()
    for number in range(25):
        counts = load(number, 2.0, 500)
        plan = watcher.round(seen(1000.0 + 15 * number, [worker(1)], counts._replace(within=counts.ended / 2))).plan
        whys |= plan.why
    assert Why.MISSED in whys


def test_pods_that_are_no_members_yet_and_replicas_without_a_pod_are_workers_that_come() -> None:
    pods = (
        WorkerPod("a", 11, UNIFIED, Served.UNIFIED, WorkerState.STARTING, 3),
        WorkerPod("b", 12, UNIFIED, Served.UNIFIED, WorkerState.PENDING, 0),
        WorkerPod("c", 13, UNIFIED, Served.UNIFIED, WorkerState.DRAINING, 3),
        WorkerPod("d", 14, UNIFIED, Served.UNIFIED, WorkerState.FAILED, 2),
    )
    cluster = Cluster(pods, (Pool("x", UNIFIED, Served.UNIFIED, 4, "1"),))
    listed = [worker(1, pod="a"), worker(3, pod="c"), worker(4, state=INSTANCE_STATE_STARTING, pod="d")]
    scene = Watcher(CONFIG, H200_LLAMA_8B).round(seen(0.0, listed, cluster=cluster))
    states = {each.worker_id: each.state for each in scene.workers}
    (missing,) = cluster.missing(cluster.pools[0])
    assert states == {
        1: WorkerState.READY,
        3: WorkerState.DRAINING,
        4: WorkerState.FAILED,
        12: WorkerState.PENDING,
        missing: WorkerState.PENDING,
    }
    assert scene.pod_of == {1: "a", 3: "c", 4: "d", 12: "b"}


def test_a_pod_that_stays_pending_is_given_up_and_no_more_are_asked_for() -> None:
    pods = (WorkerPod("b", 12, UNIFIED, Served.UNIFIED, WorkerState.PENDING, 0),)
    cluster = Cluster(pods, (Pool("x", UNIFIED, Served.UNIFIED, 1, "1"),))
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    for number in range(12):
        plan = watcher.round(seen(15.0 * number, [worker(1)], load(number, 6.0, 8000), cluster=cluster)).plan
    assert {Why.STUCK, Why.BACKS_OFF} <= plan.why
    assert plan.leaving == (12,)
    assert plan.sizes == Sizes(both=1)


def test_workers_of_a_role_without_a_pool_are_not_planned() -> None:
    pools = [Pool(each, (each, ""), Served(each), 1, "1") for each in ("prefill", "decode")]
    pods = [WorkerPod(each.name, n, each.key, each.role, WorkerState.STARTING, 3) for n, each in enumerate(pools)]
    listed = [worker(1, ROLE_PREFILL, pod="prefill"), worker(2, ROLE_DECODE, pod="decode")]
    config = replace(CONFIG, least=(), most=("prefill=1", "decode=1"))
    sizes = []
    for cluster in (Cluster(), Cluster(tuple(pods), tuple(pools))):
        watcher = Watcher(config, H200_LLAMA_8B)
        for number in range(10):
            plan = watcher.round(seen(15.0 * number, listed, load(number, 6.0, 8000), cluster=cluster)).plan
        sizes.append(plan.sizes)
    assert sizes[0].both > 0
    assert sizes[1] == Sizes(1, 1, 0)


ACTS = PlannerConfig(gpus=8, act=True, selector="x=y")  # as the chart runs it with `act` and `options.gpus` alone
PAIR = (ROLE_PREFILL, ROLE_DECODE)
ROLES = {ROLE_PREFILL: Served.PREFILL, ROLE_DECODE: Served.DECODE, ROLE_UNIFIED: Served.UNIFIED}


def pools(roles: tuple[Role, ...], replicas: int) -> Cluster:
    """Return a pool of each role, whose pods are called after it."""
    served = [ROLES[each] for each in roles]
    pods = [
        WorkerPod(f"{each.value}{n}", 100 * n + k, (each.value, ""), each, WorkerState.STARTING, 3)
        for k, each in enumerate(served)
        for n in range(replicas)
    ]
    return Cluster(tuple(pods), tuple(Pool(each.value, (each.value, ""), each, replicas, "1") for each in served))


def fleet(roles: tuple[Role, ...], number: int) -> list[Instance]:
    served = [(role, f"{ROLES[role].value}{n}") for role in roles for n in range(number)]
    return [worker(n, role, pod=pod) for n, (role, pod) in enumerate(served, 1)]


@pytest.mark.parametrize(("roles", "floor"), [((ROLE_UNIFIED,), Sizes(0, 0, 1)), (PAIR, Sizes(1, 1, 0))])
def test_who_acts_keeps_workers_that_serve_if_nobody_asks_for_anything(roles: tuple[Role, ...], floor: Sizes) -> None:
    watcher = Watcher(ACTS, H200_LLAMA_8B)
    for number in range(60):
        scene = watcher.round(seen(15.0 * number, fleet(roles, 2), cluster=pools(roles, 2)))
    assert scene.plan.sizes == floor
    assert Why.IDLE in scene.plan.why
    for number in range(60, 120):
        scene = watcher.round(seen(15.0 * number, fleet(roles, 1), cluster=pools(roles, 1)))
        assert orders(scene)[:3] == ((), (), ())


def failed(number: float, waiting: int = 0) -> Counts:
    """Return what a router says that answered 503 to so many requests, which were all."""
    metrics = RouterMetrics()
    metrics.requests.labels("chat", "unavailable").inc(number)
    metrics._waiting.set(waiting)
    return counts_of(metrics.exposition().decode(), Goal())


@pytest.mark.parametrize("roles", [(ROLE_UNIFIED,), PAIR])
def test_pools_that_somebody_scaled_to_nothing_are_woken_whoever_asks_or_not(roles: tuple[Role, ...]) -> None:
    for number in (0.0, 30.0):
        scene = Watcher(ACTS, H200_LLAMA_8B).round(seen(0.0, [], failed(number), cluster=pools(roles, 0)))
        assert {each.pool.name: each.replicas for each in orders(scene).scales} == {
            ROLES[each].value: 1 for each in roles
        }


def run_while_all_fail(waiting: int, rate: float) -> Plan:
    """Return the last plan of a quarter of an hour."""
    watcher, listed, in_a_round = Watcher(ACTS, H200_LLAMA_8B), fleet((ROLE_UNIFIED,), 3), failed(15 * rate, waiting)
    for number in range(60):
        counts = in_a_round._replace(ended=number * in_a_round.ended)
        plan = watcher.round(seen(15.0 * number, listed, counts, cluster=pools((ROLE_UNIFIED,), 3))).plan
        assert Why.IDLE not in plan.why
    return plan


def test_requests_that_all_fail_are_a_load_and_not_idleness() -> None:
    plan = run_while_all_fail(0, 30.0)
    assert plan.sizes.both >= 3
    assert not plan.leaving


def test_requests_that_wait_at_routers_are_not_idleness() -> None:
    run_while_all_fail(7, 0.0)


def test_images_at_encode_workers_are_no_requests_that_a_worker_has() -> None:
    counts = Counts(waiting=0, in_flight=7)
    assert _queued(seen(0.0, [worker(1, num_running=2)], counts)) == (5, 0)
    assert _queued(seen(0.0, [worker(1, num_running=2), worker(2, ROLE_ENCODE, num_running=5)], counts)) == (5, 0)


def test_requests_of_which_none_finishes_are_as_long_as_those_that_did() -> None:
    watcher, wanted = Watcher(ACTS, H200_LLAMA_8B), []
    for number in range(80):
        counts = load(min(number, 40), 2.0, 8000)._replace(ended=number * 30.0)  # from round 40 on all fail
        plan = watcher.round(seen(15.0 * number, [worker(1)], counts)).plan
        assert Why.LOAD_UNKNOWN not in plan.why or not number
        wanted.append(plan.sizes)
    assert wanted[-1].total >= wanted[40].total  # more, if anything: they are missed
    assert watcher.lens == Lens(8000.0, 0.0, 100.0)


def test_a_floor_is_raised_by_what_pools_can_start_until_it_serves() -> None:
    every = frozenset(ROLES.values())
    pair, unified = every - {Served.UNIFIED}, frozenset({Served.UNIFIED})
    assert serving_floor(NO_WORKERS, pair, NO_WORKERS) == Sizes(1, 1, 0)
    assert serving_floor(NO_WORKERS, unified, Sizes(2, 2, 0)) == Sizes(0, 0, 1)
    assert serving_floor(Sizes(0, 3, 0), pair, NO_WORKERS) == Sizes(1, 3, 0)
    assert serving_floor(Sizes(2, 1, 0), pair, NO_WORKERS) == Sizes(2, 1, 0)
    assert serving_floor(Sizes(0, 0, 1), pair, NO_WORKERS) == Sizes(1, 1, 1)  # no pool begins with the one
    assert serving_floor(NO_WORKERS, every, NO_WORKERS) == Sizes(0, 0, 1)
    assert serving_floor(NO_WORKERS, every, Sizes(1, 1, 0)) == Sizes(1, 1, 0)
    assert serving_floor(NO_WORKERS, frozenset({Served.DECODE}), NO_WORKERS) == NO_WORKERS  # they can't serve alone


def test_a_start_is_as_long_as_those_that_were_seen() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    pool = Pool("x", UNIFIED, Served.UNIFIED, 2, "1")
    for now_s, listed in ((0.0, 1), (15.0, 2), (135.0, 2)):
        state = WorkerState.PENDING if now_s == 15.0 else WorkerState.STARTING
        states = [WorkerState.STARTING, state][:listed]
        pods = [WorkerPod("ab"[n], 11 + n, UNIFIED, Served.UNIFIED, each, 3) for n, each in enumerate(states)]
        members = [worker(1, pod="a"), *([worker(2, pod="b")] if now_s > 15.0 else [])]
        watcher.round(seen(now_s, members, cluster=Cluster(tuple(pods), (pool,))))
    assert watcher.starts.usual_s(60.0) == 120.0


def test_floors_are_read() -> None:
    assert sizes_of(["prefill=1", "decode=2"], "--least", 0) == Sizes(1, 2, 0)
    for text in ("both=1", "prefill", "decode=-1"):
        with pytest.raises(ConfigError, match="none of prefill=N"):
            sizes_of([text], "--least", 0)
    assert replace(CONFIG, most=("decode=3",)).limits.most == Sizes(1 << 20, 3, 1 << 20)


@pytest.mark.parametrize(
    "value",
    [{"gpus": -1}, {"interval_s": 60.0}, {"ttft_slo_ms": -5.0}, {"metrics_port": 99_999}, {"most": ("both=1",)}],
)
def test_options_that_cannot_be_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(value)).replace("_", "-")):
        replace(CONFIG, **value).validate()


def test_who_acts_must_know_whom_to_scale_and_how_far() -> None:
    for config in (replace(CONFIG, act=True), replace(CONFIG, act=True, selector="a=b", gpus=0)):
        with pytest.raises(ConfigError, match="--act needs --selector"):
            config.validate()
    replace(CONFIG, act=True, selector="a=b").validate()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"least": ("prefill=2",)}, "with --least prefill=2 nobody would"),
        ({"least": ("unified=0", "decode=1")}, "must have unified=1, or prefill=1 and decode=1"),
        ({"least": ("prefill=4", "decode=5")}, "--gpus 8 has room for 8 workers of 1 GPUs .*: --act keeps 9"),
        ({"gpus": 1, "tp": 2}, "--act keeps 1 at least"),
    ],
)
def test_who_acts_is_given_a_floor_that_serves(value: dict[str, Any], words: str) -> None:
    ACTS.validate()
    replace(ACTS, act=False, **value).validate()
    with pytest.raises(ConfigError, match=words):
        replace(ACTS, **value).validate()


def test_pools_of_which_nobody_tells_are_as_large_as_they_were_and_never_of_one_token() -> None:
    """While workers start nobody says how large a KV pool is: more of them would hold no request either."""
    coming = Instance(instance_id=1, role=ROLE_UNIFIED, state=INSTANCE_STATE_STARTING)
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    for number in range(8):
        plan = watcher.round(seen(1000.0 + 15 * number, [coming], load(number, 0.5, 2000))).plan
    assert plan.sizes == Sizes(both=1)
    assert Why.HOLDS in plan.why
    watcher.round(seen(1120.0, [worker(1)], load(8, 0.5, 2000)))
    known = watcher.capacity
    watcher.round(seen(1135.0, [coming], load(9, 0.5, 2000)))
    assert watcher.capacity == known
    assert known.kv_tokens == 50_000 * CONFIG.page_size


def test_who_served_before_a_planner_began_is_as_old_as_it_says() -> None:
    """Else a planner that starts anew takes caches that are full for cold ones, and asks for nobody for two minutes."""
    old, new = worker(1), worker(2)
    old.started_unix_ns, new.started_unix_ns = 10**9, 880 * 10**9
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    first = watcher.round(seen(5000.0, [old, new], unix_ns=900 * 10**9))
    assert {each.worker_id: each.since_s for each in first.workers} == {1: 5000.0 - (899 - CONFIG.start_s), 2: 5000.0}
    later = worker(3)
    later.started_unix_ns = 10**9  # it was starting, or not listed: it is ready since now as far as anybody knows
    second = watcher.round(seen(5015.0, [old, new, later], unix_ns=915 * 10**9))
    assert [each.since_s for each in second.workers] == [5000.0 - (899 - CONFIG.start_s), 5000.0, 5015.0]


def test_a_planner_that_starts_anew_beside_warm_workers_sees_at_once_what_is_too_much() -> None:
    there = worker(1)
    there.started_unix_ns = 10**9
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    for number in range(3):
        unix_ns = (900 + 15 * number) * 10**9
        plan = watcher.round(seen(1000.0 + 15 * number, [there], load(number, 6.0, 8000), unix_ns=unix_ns)).plan
    assert plan.sizes.total > 1
