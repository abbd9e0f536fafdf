"""What a plan asks of a cluster; and, with Kubernetes' own choice of who goes, that nobody goes who serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from diptych.common.members.roles import Role
from diptych.planner.pools.cluster import RANK_NOT_READY, RANK_READY, RANK_UNPLACED, Cluster, Pool, WorkerPod
from diptych.planner.pools.orders import Orders, Scale, Scene, SetRole, orders
from diptych.planner.pools.patience import FIRST_S, LONGEST_S, Patience
from diptych.planner.values import Flip, Plan, Worker, WorkerState

DECODE = Pool("decode", ("decode", "default"), Role.DECODE, 2, "7")
PREFILL = Pool("prefill", ("prefill", "default"), Role.PREFILL, 1, "9")


def pod(
    number: int, pool: Pool = DECODE, rank: int = RANK_READY, state: WorkerState = WorkerState.STARTING
) -> WorkerPod:
    return WorkerPod(f"p{number}", number, pool.key, pool.role, state, rank)


def worker(number: int, role: Role = Role.DECODE, state: WorkerState = WorkerState.READY) -> Worker:
    return Worker(number, role, state, 0.0)


def ordered(plan: Plan, workers: Sequence[Worker], pods: Sequence[WorkerPod], *pools: Pool) -> Orders:
    pod_of = {each.worker_id: f"p{each.worker_id}" for each in workers}
    return orders(Scene(plan, workers, pod_of, Cluster(tuple(pods), pools)))


BOTH = ([worker(1), worker(2)], [pod(1), pod(2)])


def test_what_is_as_planned_asks_for_nothing() -> None:
    assert ordered(Plan(0, 2, 0), *BOTH, DECODE) == Orders()


def test_more_workers_are_more_replicas() -> None:
    assert ordered(Plan(0, 5, 0), *BOTH, DECODE) == Orders(scales=(Scale(DECODE, 5),))


def test_more_are_asked_of_the_pool_that_has_no_trouble() -> None:
    other = DECODE._replace(name="other", key=("decode", "other"), replicas=1)
    stuck = pod(3, other, RANK_UNPLACED, WorkerState.PENDING)
    workers = [*BOTH[0], worker(3, state=WorkerState.PENDING)]
    found = ordered(Plan(0, 4, 0), workers, [*BOTH[1], stuck], other, DECODE)
    assert found.scales == (Scale(DECODE, 3),)


def test_who_serves_is_drained_first_and_its_replica_goes_once_its_pod_is_not_ready() -> None:
    assert ordered(Plan(0, 1, 0, leaving=(2,)), *BOTH, DECODE) == Orders(drains=(2,))
    drains = [worker(1), worker(2, state=WorkerState.DRAINING)]
    assert ordered(Plan(0, 1, 0), drains, [pod(1), pod(2)], DECODE) == Orders()
    unready = [pod(1), pod(2, rank=RANK_NOT_READY)]
    assert ordered(Plan(0, 1, 0), drains, unready, DECODE) == Orders(scales=(Scale(DECODE, 1),))


def test_who_serves_although_its_pod_is_not_ready_is_drained_first_too() -> None:
    unready = [pod(1), pod(2, rank=RANK_NOT_READY)]
    assert ordered(Plan(0, 1, 0, leaving=(2,)), BOTH[0], unready, DECODE) == Orders(drains=(2,))


def test_who_is_about_to_start_keeps_a_pool_from_shrinking_as_it_would_go_in_place_of_the_one_that_may() -> None:
    workers = [worker(1), worker(2, state=WorkerState.DRAINING), worker(3, state=WorkerState.STARTING)]
    pods = [pod(1), pod(2, rank=RANK_NOT_READY), pod(3, rank=RANK_NOT_READY)]
    assert ordered(Plan(0, 2, 0), workers, pods, DECODE._replace(replicas=3)) == Orders()


def test_what_finds_no_place_is_given_back_at_once() -> None:
    workers = [worker(1), worker(2), worker(3, state=WorkerState.PENDING)]
    pods, three = [pod(1), pod(2), pod(3, rank=RANK_UNPLACED)], DECODE._replace(replicas=3)
    found = ordered(Plan(0, 2, 0, leaving=(3,)), workers, pods, three)
    assert found == Orders(scales=(Scale(three, 2),))


def test_a_replica_that_never_got_a_pod_is_given_back_too() -> None:
    three = DECODE._replace(replicas=3)
    cluster = Cluster((pod(1), pod(2)), (three,))
    (missing,) = cluster.missing(three)
    workers = [worker(1), worker(2), worker(missing, state=WorkerState.PENDING)]
    scene = Scene(Plan(0, 2, 0, leaving=(missing,)), workers, {1: "p1", 2: "p2"}, cluster)
    assert orders(scene) == Orders(scales=(Scale(three, 2),))


def test_a_pool_grows_first_and_shrinks_later() -> None:
    workers = [worker(1), worker(2, state=WorkerState.DRAINING)]
    found = ordered(Plan(0, 2, 0), workers, [pod(1), pod(2, rank=RANK_NOT_READY)], DECODE)
    assert found == Orders(scales=(Scale(DECODE, 3),))


def test_what_others_scaled_meanwhile_is_where_it_goes_on() -> None:
    five = DECODE._replace(replicas=5)  # two have a pod
    cluster = Cluster((pod(1), pod(2)), (five,))
    workers = [worker(1), worker(2), *(worker(each, state=WorkerState.PENDING) for each in cluster.missing(five))]
    assert orders(Scene(Plan(0, 6, 0), workers, {1: "p1", 2: "p2"}, cluster)).scales == (Scale(five, 6),)


def test_a_pool_that_an_autoscaler_scales_is_left_alone_with_its_workers() -> None:
    scaled = DECODE._replace(hands_off="the HPA x scales it")
    grown = ordered(Plan(1, 3, 0), [*BOTH[0], worker(3, Role.PREFILL)], [*BOTH[1], pod(3, PREFILL)], scaled, PREFILL)
    words = "1 more decode workers are wanted, and no pool of that role may be scaled"
    assert grown == Orders(left=(words, "decode is left alone: the HPA x scales it"))
    shrunk = ordered(Plan(0, 1, 0, roles=(Flip(1, Role.PREFILL),), leaving=(2,)), *BOTH, scaled)
    assert (shrunk.scales, shrunk.drains, shrunk.roles) == ((), (), ())


def test_roles_change_where_they_are_and_count_for_the_new_one() -> None:
    plan = Plan(1, 1, 0, roles=(Flip(2, Role.PREFILL),))
    assert ordered(plan, *BOTH, DECODE) == Orders(roles=(SetRole(2, Role.PREFILL),))


def test_groups_over_nodes_are_left_as_they_are_and_it_is_said() -> None:
    groups = [pod(1)._replace(is_group=True), pod(2)._replace(is_group=True)]
    asked = ordered(Plan(0, 1, 0, roles=(Flip(1, Role.PREFILL),), leaving=(2,)), BOTH[0], groups)
    assert (asked.scales, asked.drains, asked.roles) == ((), (), ())
    words = "the pool default of decode is left alone: each worker is a group of pods (nodes.count); set replicas"
    assert words in asked.left


def test_pods_of_several_workers_and_workers_without_a_pod_are_left_as_they_are() -> None:
    workers = [worker(1), worker(2)]
    several = Scene(Plan(0, 1, 0, leaving=(2,)), workers, {1: "p1", 2: "p1"}, Cluster((pod(1),), (DECODE,)))
    assert orders(several).left == ("decode is left alone: its pods are several workers each (--dp)",)
    assert not orders(several).drains
    nowhere = Scene(Plan(0, 1, 0, leaving=(2,)), workers, {1: "p1"}, Cluster((pod(1),), (DECODE._replace(replicas=1),)))
    assert orders(nowhere) == Orders(left=("workers 0000000000000002 run in no pod of a pool, and stay as they are",))


def test_a_replica_that_was_taken_back_and_whose_pod_is_still_there_is_taken_back_once() -> None:
    workers = [worker(1), worker(2), worker(3, state=WorkerState.DRAINING)]
    pods = [pod(1), pod(2), pod(3, rank=RANK_NOT_READY)]
    assert ordered(Plan(0, 2, 0), workers, pods, DECODE) == Orders()  # two replicas of three pods


@dataclass
class Replicas:
    """A Deployment whose pods start, become ready, drain and go as Kubernetes has it; `rng` chooses among equals."""

    rng: random.Random
    replicas: int
    states: dict[int, WorkerState] = field(default_factory=dict)
    seen_ready: dict[int, bool] = field(default_factory=dict)  # as the kubelet has told
    ended: list[tuple[int, WorkerState]] = field(default_factory=list)
    num_made: int = 0
    changed: set[int] = field(default_factory=set)  # pods that did since Kubernetes chose last
    trembles: float = 0.0  # how likely a pod that is ready is not for a moment

    def settle(self) -> None:
        while len(self.states) < self.replicas:
            self.num_made += 1
            self.states[self.num_made], self.seen_ready[self.num_made] = WorkerState.PENDING, False
        while len(self.states) > self.replicas:
            worst = min(map(self.rank, self.states))
            number = self.rng.choice([each for each in self.states if self.rank(each) == worst])
            self.ended.append((number, self.states.pop(number)))

    def rank(self, number: int) -> int:
        if self.states[number] is WorkerState.PENDING:
            return RANK_UNPLACED
        return RANK_READY if self.seen_ready[number] else RANK_NOT_READY

    def happen(self) -> None:
        """Some pods get on, and the kubelet tells of some what they are."""
        following = {WorkerState.PENDING: WorkerState.STARTING, WorkerState.STARTING: WorkerState.READY}
        for number, state in self.states.items():
            before = self.rank(number), state
            if self.rng.random() < 0.4:
                self.states[number] = following.get(state, state)
            if self.rng.random() < 0.4:
                self.seen_ready[number] = self.states[number] is WorkerState.READY
            if self.rng.random() < self.trembles:
                self.seen_ready[number] = False
            if before != (self.rank(number), self.states[number]):
                self.changed.add(number)

    def may_happen(self) -> None:
        if self.rng.random() < 0.5:
            self.happen()

    def round(self, wanted: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Plan so many, as the planner does: who leaves is said of those that are there, the rest are asked for.

        `meanwhile` comes between hearing of workers and reading pods.
        """
        there = [each for each, state in self.states.items() if state is not WorkerState.DRAINING]
        leaving = tuple(self.rng.sample(there, max(0, len(there) - wanted)))
        workers = [worker(each, state=state) for each, state in self.states.items()]
        meanwhile()
        pool = DECODE._replace(replicas=self.replicas)
        pods = tuple(pod(each, rank=self.rank(each)) for each in self.states)
        found = orders(
            Scene(
                Plan(0, wanted, 0, leaving=leaving),
                workers,
                {n: f"p{n}" for n in there + self.gone},
                Cluster(pods, (pool,)),
            )
        )
        for number in found.drains:
            self.states[number] = WorkerState.DRAINING
        for scale in found.scales:
            self.replicas = scale.replicas

    @property
    def gone(self) -> list[int]:
        return [each for each, state in self.states.items() if state is WorkerState.DRAINING]


@pytest.mark.parametrize("seed", range(40))
def test_nobody_who_serves_is_ended_if_nothing_happens_meanwhile_and_in_the_end_there_is_what_was_wanted(
    seed: int,
) -> None:
    rng = random.Random(seed)
    world = Replicas(rng, 2)
    for _ in range(60):
        wanted = rng.randint(1, 6)
        for _ in range(rng.randint(1, 4)):
            world.settle()
            world.happen()
            world.round(wanted)
    for _ in range(60):
        world.settle()
        world.happen()
        world.round(3)
    assert world.ended
    assert all(state is not WorkerState.READY for _, state in world.ended)
    assert sorted(world.states.values(), key=str) == [WorkerState.READY] * 3


@pytest.mark.parametrize("seed", range(40))
def test_as_many_who_serve_are_ended_at_most_as_have_changed_since_what_was_read(seed: int) -> None:
    """Between what is read and Kubernetes' choice pods get ready and stop being so, rounds repeat, and it lags."""
    rng = random.Random(seed)
    world = Replicas(rng, 2, trembles=0.2)
    for _ in range(100):
        wanted = rng.randint(1, 6)
        for _ in range(rng.randint(1, 3)):
            world.round(wanted, world.may_happen)
            world.may_happen()
        num_ended = len(world.ended)
        world.settle()
        serving = [number for number, state in world.ended[num_ended:] if state is WorkerState.READY]
        assert len(serving) <= len(world.changed)
        world.changed.clear()
        world.happen()
        world.changed.clear()
    world.trembles = 0.0
    for _ in range(60):
        world.settle()
        world.happen()
        world.round(3)
    assert sorted(world.states.values(), key=str) == [WorkerState.READY] * 3


def test_what_fails_is_left_alone_for_twice_as_long_each_time_and_forgotten_once_it_works() -> None:
    patience = Patience()
    assert [patience.failed("a", 0.0) for _ in range(8)][:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert patience.failed("a", 100.0) == LONGEST_S
    assert not patience.may_try("a", 100.0 + LONGEST_S - 1)
    assert patience.may_try("a", 100.0 + LONGEST_S)
    assert patience.may_try("b", 0.0)
    patience.worked("a")
    assert patience.may_try("a", 0.0)
