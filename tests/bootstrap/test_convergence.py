"""Whatever messages are lost, doubled, late or overtaken: every watcher comes to see the truth within one lease.

The world (`tests/support/membership_world.py`) checks the rules as it plays; planted bugs show that it can.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from membership_actors import LEASE_S, Wrong
from membership_world import World, disturb

from diptych.bootstrap import membership, replica
from diptych.bootstrap.announcement import read_heartbeat
from diptych.bootstrap.membership import Delta, Membership
from diptych.bootstrap.outbox import Outbox
from diptych.common.members.membership import SUPERSEDED_LEASES, MembershipView

NUM_GAMES = 30
Mutant = Callable[[pytest.MonkeyPatch], None]


def play(seed: int, seconds: float = 20.0) -> None:
    world = World(seed, num_replicas=1 + seed % 3)
    world.play(seconds, disturb)
    world.calm_down()
    world.converge()


def play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


@pytest.mark.parametrize("seed", [*range(NUM_GAMES), 121751494, 137624181, 1323436054])
def test_all_watchers_see_the_truth_within_a_lease_after_the_last_disturbance(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_else_is_seen_when_former_selves_are_forgotten(seed: int) -> None:
    play(seed, 4 * SUPERSEDED_LEASES * LEASE_S)


@pytest.mark.skipif(
    not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="what it finds depends on chance: DIPTYCH_DEEP_CHECKS=1"
)
def test_other_games_in_every_run() -> None:
    for _ in range(NUM_GAMES):
        seed = random.randrange(2**32)
        try:
            play(seed)
        except Wrong as wrong:
            raise AssertionError(f"play({seed})") from wrong


def test_a_worker_that_restarts_50_times_at_its_address_is_never_taken_for_its_former_self() -> None:
    world = World(seed=0, num_replicas=2, num_addresses=1)
    address = world.addresses[0]
    for _ in range(50):
        world.start(address)
        world.play(world.rng.choice((0.3, 1.0, 2.5, 5.0)), lambda world: world.change(address))
    world.calm_down()
    world.converge()
    assert [len(watcher.view.instances) for watcher in world.watchers] == [1, 1, 1]


# Planted bugs


def _late_messages_count(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    patch.setattr(replica, "read_heartbeat", lambda *said: replace(read_heartbeat(*said), sequence=next(numbers)))


def _the_first_replica_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diptych.common.members.membership._sequence", lambda record: 0)


def _addresses_go_by_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership._Member, "rank", property(lambda member: (0, member.order)))


def _leases_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_on_tick", lambda self, now_s: Delta())


def _nothing_is_retained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MembershipView, "_retain", lambda self, number: set(self._replicas.pop(number, {})))


def _retentions_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MembershipView, "_set_retentions", lambda self, now_s: None)


def _former_selves_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MembershipView, "_is_superseded", lambda self, known: False)


def _departures_are_not_told(patch: pytest.MonkeyPatch) -> None:
    add = Outbox.add
    patch.setattr(Outbox, "add", lambda self, upserts, removed, ended: add(self, upserts, (), ()))


MUTANTS: list[Mutant] = [
    _late_messages_count,
    _the_first_replica_is_believed,
    _addresses_go_by_arrival,
    _leases_never_end,
    _nothing_is_retained,
    _retentions_never_end,
    _former_selves_stay,
    _departures_are_not_told,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_planted_bug_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Wrong):
        play_all(range(NUM_GAMES))
