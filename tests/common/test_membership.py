from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.membership import Lost, MembershipView, Record, Snapshot, State, Update

LEASE_S = 3.0


def record(instance_id: int, *, at: str = "", state: State = State.READY, payload: str = "") -> Record[str]:
    return Record(instance_id, at or f"host-{instance_id}:1", state, payload or f"{instance_id}")


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


def test_the_furthest_state_wins_over_a_later_message_of_a_slow_replica(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, state=State.DRAINING, payload="draining"),)), 0.0)
    view.apply(Snapshot(1, (record(1, state=State.READY, payload="ready"),)), 1.0)
    assert view.instances == {1: "draining"}


def test_of_two_records_in_one_state_the_later_arrival_wins(view: MembershipView[str]) -> None:
    view.apply(Snapshot(0, (record(1, payload="old"),)), 0.0)
    view.apply(Snapshot(1, (record(1, payload="new"),)), 1.0)
    assert view.instances == {1: "new"}


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
    assert view.apply(Update(0, (record(2, at="host:1"),)), 2.5)
    assert view.instances == {2: "2"}


# A naive model: each replica sends, in order, what it lists; the streams interleave at random and break now and then.

NUM_REPLICAS = 3
edits = st.tuples(
    st.integers(0, NUM_REPLICAS - 1),
    st.integers(1, 5),
    st.sampled_from(["starting", "ready", "draining", "removed", "lost"]),
)


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(edits, max_size=60), last=st.dictionaries(st.integers(1, 5), st.integers(1, 3)), data=st.data())
def test_once_all_replicas_agree_every_watcher_agrees_with_them(
    edits: list[tuple[int, int, str]], last: dict[int, int], data: st.DataObject
) -> None:
    """Whatever happened before and in whatever order the streams arrive."""
    view: MembershipView[str] = MembershipView(lease_s=LEASE_S)
    for replica in range(NUM_REPLICAS):
        view.apply(Snapshot(replica, ()), 0.0)
    for replica, instance_id, edit in edits:
        if edit == "lost":
            view.apply(Lost(replica), 1.0)
            view.apply(Snapshot(replica, ()), 1.0)
        elif edit == "removed":
            view.apply(Update(replica, removed=(instance_id,)), 1.0)
        else:
            view.apply(Update(replica, (record(instance_id, state=State[edit.upper()]),)), 1.0)
    final = tuple(record(instance_id, state=State(state), payload="final") for instance_id, state in last.items())
    streams: list[deque[Snapshot[str] | Update[str] | Lost]] = [
        deque((Lost(replica), Snapshot(replica, final), Update(replica, final))) for replica in range(NUM_REPLICAS)
    ]
    while any(streams):
        stream = data.draw(st.sampled_from([stream for stream in streams if stream]))
        view.apply(stream.popleft(), 2.0)
    view.expire(2.0 + LEASE_S)
    assert view.instances == dict.fromkeys(last, "final")
    assert view.next_deadline_s is None
