from __future__ import annotations

import pytest

from diptych.common.members.membership import SUPERSEDED_LEASES, Lost, MembershipView, Snapshot, Update
from diptych.common.members.record import Record, State

LEASE_S = 3.0


def record(
    instance_id: int,
    state: State = State.READY,
    *,
    at: str = "",
    payload: str = "",
    started_ns: int = 0,
    sequence: int = 0,
) -> Record[str]:
    return Record(instance_id, at or f"host-{instance_id}:1", state, payload or f"{instance_id}", started_ns, sequence)


@pytest.fixture
def view() -> MembershipView[str]:
    return MembershipView(lease_s=LEASE_S)


def test_a_snapshot_is_everything_that_a_replica_lists(view: MembershipView[str]) -> None:
    assert view.apply(Snapshot(0, (record(1), record(2))), 0.0)
    assert view.instances == {1: "1", 2: "2"}


def test_updates_add_change_and_remove(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1), record(2))), 0.0)
    assert view.apply(Update(0, (record(2, payload="busy"), record(3)), (1,)), 1.0)
    assert view.instances == {2: "busy", 3: "3"}


def test_what_says_nothing_new_is_no_change(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),)), 0.0)
    assert not view.apply(Update(0, (record(1),), (9,)), 1.0)


def test_an_instance_stays_while_one_replica_lists_it(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),)), 0.0)
    view.apply(Snapshot(1, (record(1),)), 0.0)
    assert not view.apply(Update(0, removed=(1,)), 1.0)
    assert view.apply(Update(1, removed=(1,)), 1.0)
    assert view.instances == {}


def test_the_highest_sequence_number_wins_whatever_comes_last(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, State.DRAINING, payload="draining", sequence=8),)), 0.0)
    assert not view.apply(Snapshot(1, (record(1, payload="ready", sequence=7),)), 1.0)
    assert view.instances == {1: "draining"}
    assert view.apply(Update(1, (record(1, State.DRAINING, payload="empty", sequence=9),)), 2.0)
    assert view.instances == {1: "empty"}


def test_what_ended_is_not_listed_again_whatever_a_slower_replica_says(view: MembershipView[str]) -> None:
    for replica in (0, 1):
        view.apply(Snapshot(replica, (record(1), record(2))), 0.0)
    assert view.apply(Update(0, removed=(1,), ended=(1,)), 1.0)
    assert not view.apply(Update(1, (record(1, sequence=9),)), 2.0)
    assert not view.apply(Lost(1), 3.0)
    assert view.instances == {2: "2"}


def test_only_what_said_so_or_was_evicted_has_ended(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1), record(2), record(3))), 0.0)
    view.apply(Update(0, removed=(1, 2), ended=(1,)), 1.0)
    assert [view.has_ended(instance_id) for instance_id in (1, 2, 3)] == [True, False, False]


def test_of_two_instances_at_one_address_the_one_that_started_last_is_listed(view: MembershipView[str]) -> None:
    """Its replica is quicker to hear of it than the other one."""
    old, new = record(1, at="host:1", started_ns=5), record(2, at="host:1", started_ns=6)
    view.apply(Snapshot(0, (old,)), 0.0)
    view.apply(Snapshot(1, (old,)), 0.0)
    assert view.apply(Update(0, (new,), removed=(1,)), 1.0)
    assert view.instances == {2: "2"}
    assert not view.apply(Update(1, (record(1, at="host:1", started_ns=5, payload="busy"),)), 1.5)
    assert view.instances == {2: "2"}


def test_a_snapshot_says_by_which_lease_a_replica_goes(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),), lease_s=30.0), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, (), lease_s=30.0), 2.0)
    assert view.next_deadline_s == 32.0


def test_the_last_view_is_kept_while_bootstrap_is_away(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),)), 0.0)
    assert not view.apply(Lost(0), 1.0)
    assert view.next_deadline_s is None
    assert not view.expire(1e9)
    assert view.instances == {1: "1"}


def test_an_empty_snapshot_after_a_restart_wipes_the_view_only_after_a_lease(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1), record(2))), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, ()), 10.0)
    view.apply(Update(0, (record(2),)), 11.0)
    assert view.instances == {1: "1", 2: "2"}
    assert view.next_deadline_s == 10.0 + LEASE_S
    assert view.expire(10.0 + LEASE_S)
    assert view.instances == {2: "2"}
    assert view.next_deadline_s is None


def test_a_lease_that_began_is_suspended_when_bootstrap_goes_away_again(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),)), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, ()), 2.0)
    view.apply(Lost(0), 3.0)
    assert not view.expire(100.0)
    assert view.instances == {1: "1"}


def test_a_live_replica_may_drop_what_a_lost_one_had_listed(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1),)), 0.0)
    view.apply(Snapshot(1, (record(1),)), 0.0)
    view.apply(Lost(0), 1.0)
    assert view.apply(Update(1, removed=(1,)), 1.5)
    assert view.instances == {}


def test_a_newer_instance_at_the_same_address_ends_a_retention_at_once(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, at="host:1"),)), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, ()), 2.0)
    assert view.apply(Update(0, (record(2, at="host:1", started_ns=1),)), 2.5)
    assert view.instances == {2: "2"}


def test_a_second_loss_begins_a_new_retention(view: MembershipView[str]) -> None:
    """Bootstrap is restarted, one replica after the other."""
    view.apply(Snapshot(0, (record(1),)), -1.0)
    view.apply(Snapshot(1, (record(1),)), -1.0)
    view.apply(Lost(0), 0.0)
    view.apply(Snapshot(0, ()), 2.0)
    view.apply(Lost(1), 2.9)
    assert not view.expire(3.0)
    assert view.next_deadline_s == 2.9 + LEASE_S
    assert view.instances == {1: "1"}


def test_two_are_never_listed_at_one_address_also_when_the_newer_one_is_only_retained(
    view: MembershipView[str],
) -> None:
    view.apply(Snapshot(0, (record(1, at="host:1", started_ns=9),)), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, (record(2, at="host:1", started_ns=5),)), 2.0)
    assert view.instances == {1: "1"}


def test_a_former_self_is_not_listed_when_only_late_words_of_it_reach_a_replica(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, at="host:1", started_ns=9),)), 0.0)
    view.apply(Snapshot(1, (record(2, at="host:1", started_ns=5),)), 0.0)
    view.apply(Update(0, removed=(1,)), 3.0)
    assert view.instances == {}


def test_a_former_self_that_is_only_retained_is_not_listed_however_long_no_replica_is_connected(
    view: MembershipView[str],
) -> None:
    view.apply(Snapshot(0, (record(1, at="host:1", started_ns=9),)), 0.0)
    view.apply(Snapshot(1, (record(2, at="host:1", started_ns=5),)), 0.0)
    view.apply(Update(0, removed=(1,)), 1.0)
    view.apply(Lost(1), 1.0)
    view.apply(Lost(0), 1.5)
    for lease in range(2 * SUPERSEDED_LEASES):
        view.expire(1.5 + lease * LEASE_S)
        assert view.instances == {}
    assert view.next_deadline_s is None
    assert view.apply(Snapshot(0, (record(2, at="host:1", started_ns=5),)), 100.0)  # it lives after all
    assert view.instances == {2: "2"}


def test_what_was_superseded_by_a_wrong_clock_is_listed_some_leases_later(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, at="host:1", started_ns=9),)), 0.0)
    view.apply(Lost(0), 1.0)
    view.apply(Snapshot(0, (record(2, at="host:1", started_ns=5),)), 2.0)
    view.expire(2.0 + LEASE_S)  # the first is forgotten
    assert view.instances == {}
    assert view.next_deadline_s == 2.0 + SUPERSEDED_LEASES * LEASE_S
    assert view.expire(2.0 + SUPERSEDED_LEASES * LEASE_S)
    assert view.instances == {2: "2"}
