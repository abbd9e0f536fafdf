from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.members.membership import MembershipView, Snapshot, Update
from diptych.common.members.record import Record, State
from diptych.common.members.watch_stream import Gap, WatchStream, to_record
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, Instance, LoadNews, WatchUpdate, WorkerLoad


def instance(instance_id: int, sequence: int = 1, num_running: int = 0) -> Instance:
    load = WorkerLoad(num_running=num_running)
    return Instance(
        instance_id=instance_id, address=f"a:{instance_id}", state=INSTANCE_STATE_READY, sequence=sequence, load=load
    )


def news(instance_id: int, sequence: int, num_running: int) -> LoadNews:
    return LoadNews(instance_id=instance_id, sequence=sequence, load=WorkerLoad(num_running=num_running))


@pytest.fixture
def stream() -> WatchStream:
    stream = WatchStream(7)
    stream.receive(WatchUpdate(revision=1, snapshot=True, upserts=[instance(1), instance(2)]))
    return stream


def test_the_scheduler_groups_of_a_worker_share_its_address_without_evicting_each_other() -> None:
    groups = [Instance(instance_id=9, address="a:1", dp_rank=rank, state=INSTANCE_STATE_READY) for rank in range(3)]
    assert [to_record(group).address for group in groups] == ["a:1", "a:1#1", "a:1#2"]


def test_a_stream_begins_with_a_snapshot() -> None:
    update = WatchUpdate(revision=1, snapshot=True, upserts=[instance(1, sequence=5)], lease_ms=2500)
    record = Record(1, "a:1", State.READY, instance(1, sequence=5), sequence=5)
    assert WatchStream(7).receive(update) == Snapshot(7, (record,), lease_s=2.5)


def test_a_stream_that_misses_something_is_given_up(stream: WatchStream) -> None:
    with pytest.raises(Gap):
        WatchStream(7).receive(WatchUpdate(revision=1))
    with pytest.raises(Gap):
        stream.receive(WatchUpdate(revision=3))


def test_news_of_a_load_make_a_newer_record_of_what_was_told_before(stream: WatchStream) -> None:
    update = stream.receive(WatchUpdate(revision=2, loads=[news(1, 4, num_running=8), news(9, 4, num_running=8)]))
    changed = instance(1, sequence=4, num_running=8)
    assert update == Update(7, (Record(1, "a:1", State.READY, changed, sequence=4),))


def test_a_load_from_before_the_record_is_old_news(stream: WatchStream) -> None:
    update = WatchUpdate(
        revision=2, upserts=[instance(1, sequence=6, num_running=1)], loads=[news(1, 5, num_running=9)]
    )
    event = stream.receive(update)
    assert isinstance(event, Update)
    assert [record.payload.load.num_running for record in event.upserts] == [1]


def test_what_is_removed_has_no_load_any_more(stream: WatchStream) -> None:
    update = WatchUpdate(revision=2, removed=[1], ended=[1], loads=[news(1, 5, num_running=9)])
    assert stream.receive(update) == Update(7, (), (1,), (1,))


def test_an_instance_in_a_state_of_a_later_version_is_left_out(stream: WatchStream) -> None:
    later = Instance.FromString(Instance(instance_id=3, address="a:3").SerializeToString() + b"\x30\x63")  # state 99
    assert stream.receive(WatchUpdate(revision=2, upserts=[later])) == Update(7)


messages = st.builds(
    WatchUpdate,
    revision=st.integers(0, 3),
    snapshot=st.booleans(),
    upserts=st.lists(st.builds(instance, st.integers(0, 3), st.integers(0, 9)), max_size=3),
    removed=st.lists(st.integers(0, 3), max_size=3),
    ended=st.lists(st.integers(0, 3), max_size=3),
    loads=st.lists(st.builds(news, st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=3),
    lease_ms=st.integers(0, 2**32 - 1),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(messages, max_size=12))
def test_whatever_a_replica_says_a_watcher_goes_on(updates: list[WatchUpdate]) -> None:
    stream, view = WatchStream(0), MembershipView[Instance](lease_s=3.0)
    for update in updates:
        try:
            view.apply(stream.receive(update), 0.0)
        except Gap:
            return
    assert len(view.instances) <= 4
