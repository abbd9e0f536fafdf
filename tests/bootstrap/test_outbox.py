from __future__ import annotations

import pytest

from diptych.bootstrap.outbox import MAX_LEFT, Outbox
from diptych.v1.bootstrap_pb2 import Instance, LoadNews, WatchUpdate


def upserts(*ids: int) -> dict[int, bytes]:
    return {i: WatchUpdate(upserts=[Instance(instance_id=i)]).SerializeToString() for i in ids}


def loads(*ids: int) -> dict[int, bytes]:
    return {i: WatchUpdate(loads=[LoadNews(instance_id=i)]).SerializeToString() for i in ids}


@pytest.fixture
def outbox() -> Outbox:
    """A snapshot of nobody has been taken."""
    outbox = Outbox(lease_ms=3000)
    outbox.pop(lambda: ())
    return outbox


def snapshot(revision: int, *ids: int) -> WatchUpdate:
    everybody = [Instance(instance_id=i) for i in ids]
    return WatchUpdate(revision=revision, snapshot=True, upserts=everybody, lease_ms=3000, max_silence_ms=1000)


def pop_update(outbox: Outbox) -> WatchUpdate:
    return WatchUpdate.FromString(outbox.pop(lambda: upserts(8, 9).values()))


def test_a_snapshot_of_everything_is_due_first() -> None:
    assert pop_update(Outbox(lease_ms=3000)) == snapshot(1, 8, 9)


def test_a_slow_watcher_is_told_the_sum_of_what_it_missed(outbox: Outbox) -> None:
    outbox.add(upserts(1, 2), (), ())
    outbox.add_loads(loads(1, 2))
    outbox.add({}, removed=(1,), ended=(1,))
    outbox.add({}, removed=(2,), ended=())
    outbox.add(upserts(2), (), ())
    assert pop_update(outbox) == WatchUpdate(revision=2, upserts=[Instance(instance_id=2)], removed=[1], ended=[1])
    assert outbox.is_empty


def test_a_watcher_that_missed_too_much_gets_a_snapshot(outbox: Outbox) -> None:
    for left in range(MAX_LEFT + 1):
        outbox.add({}, removed=(left,), ended=())
    outbox.add(upserts(1), (), ())
    assert pop_update(outbox) == snapshot(2, 8, 9)
    assert outbox.is_empty
