from __future__ import annotations

import asyncio

import pytest

from diptych.common.errors import Overloaded
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_feed import MAX_HASHES, KvFeeds
from diptych.engine.frontend.sessions import MAX_OPEN_ROOMS, MAX_SESSIONS, Session, Sessions
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

LAST = inference_pb2.FINISH_REASON_STOP


def legs(*rooms: int) -> list[worker_pb2.StartLeg]:
    return [worker_pb2.StartLeg(room=room) for room in rooms]


def test_each_session_gets_its_own_rooms_in_one_batch() -> None:
    sessions = Sessions(Role.DECODE)
    first, second = sessions.open(), sessions.open()
    sessions.start(first, legs(1, 2))
    sessions.start(second, legs(3))
    sessions.deliver([worker_pb2.LegOutput(room=room, token_ids=[room]) for room in (1, 3, 2, 1)])
    batch = asyncio.run(first.next_batch())
    assert [output.room for output in batch.outputs] == [1, 2, 1]
    assert [output.room for output in asyncio.run(second.next_batch()).outputs] == [3]


def test_a_token_goes_to_the_session_of_its_room_if_that_is_still_open() -> None:
    sessions = Sessions(Role.DECODE)
    first, second = sessions.open(), sessions.open()
    sessions.start(first, legs(1, 2))
    sessions.start(second, legs(3))
    tokens = engine_pb2.NextTokens(rooms=[1, 3, 9, 2], indices=[4, 5, 6, 7], token_ids=[40, 50, 60, 70])
    sessions.deliver_tokens(tokens)
    sessions.deliver([worker_pb2.LegOutput(room=1, first_index=5, token_ids=[41], finish_reason=LAST)])
    assert list(asyncio.run(first.next_batch()).outputs) == [
        worker_pb2.LegOutput(room=1, first_index=4, token_ids=[40]),
        worker_pb2.LegOutput(room=2, first_index=7, token_ids=[70]),
        worker_pb2.LegOutput(room=1, first_index=5, token_ids=[41], finish_reason=LAST),
    ]
    assert list(asyncio.run(second.next_batch()).outputs) == [
        worker_pb2.LegOutput(room=3, first_index=5, token_ids=[50])
    ]


def test_a_room_in_use_is_refused_and_its_owner_untouched() -> None:
    sessions = Sessions(Role.DECODE)
    owner, intruder = sessions.open(), sessions.open()
    sessions.start(owner, legs(1))
    assert sessions.start(intruder, legs(1, 0)) == []
    refused = asyncio.run(intruder.next_batch()).outputs
    assert [output.error.code for output in refused] == [worker_pb2.ERROR_CODE_INVALID] * 2
    assert sessions.owned(intruder, [1]) == []
    assert sessions.owned(owner, [1, 2]) == [1]


def test_a_finished_room_is_forgotten() -> None:
    sessions = Sessions(Role.DECODE)
    session = sessions.open()
    sessions.start(session, legs(1, 2))
    sessions.deliver([worker_pb2.LegOutput(room=1, finish_reason=LAST)])
    sessions.deliver([worker_pb2.LegOutput(room=2, error=worker_pb2.LegError(message="x"))])
    assert sessions.num_open_rooms == 0
    assert [leg.room for leg in sessions.start(session, legs(1))] == [1]


def test_closing_a_session_names_the_rooms_to_abort() -> None:
    sessions = Sessions(Role.DECODE)
    session = sessions.open()
    sessions.start(session, legs(2, 1))
    assert sessions.close(session) == [1, 2]
    sessions.deliver([worker_pb2.LegOutput(room=1, finish_reason=LAST)])
    assert sessions.num_open_rooms == 0


def test_a_new_session_learns_the_load_at_once() -> None:
    sessions = Sessions(Role.DECODE)
    sessions.set_load(bootstrap_pb2.WorkerLoad(num_running=3))
    session = sessions.open()
    assert asyncio.run(session.next_batch()).load.num_running == 3


def kv_events(session: Session) -> worker_pb2.KvEvents:
    return asyncio.run(session.next_batch()).kv_events


def test_a_new_session_learns_the_cached_pages_and_then_the_changes() -> None:
    sessions = Sessions(Role.DECODE, KvFeeds())
    sessions.announce_kv(worker_pb2.KvEvents(stored=[1, 2]))
    session = sessions.open()
    assert kv_events(session) == worker_pb2.KvEvents(sequence=1, cleared=True, stored=[1, 2])
    sessions.announce_kv(worker_pb2.KvEvents(stored=[3], removed=[2]))
    assert kv_events(session) == worker_pb2.KvEvents(sequence=2, stored=[3], removed=[2])


def test_many_pages_are_told_in_several_messages() -> None:
    sessions = Sessions(Role.DECODE, KvFeeds())
    sessions.announce_kv(worker_pb2.KvEvents(stored=range(MAX_HASHES + 1)))
    session = sessions.open()
    first, second = kv_events(session), kv_events(session)
    assert (len(first.stored), first.cleared, first.more) == (MAX_HASHES, True, True)
    assert second == worker_pb2.KvEvents(sequence=2, stored=[MAX_HASHES])


def test_a_session_that_missed_something_is_told_everything_again_and_the_others_are_not() -> None:
    sessions = Sessions(Role.DECODE, KvFeeds())
    sessions.announce_kv(worker_pb2.KvEvents(stored=[1]))
    first, second = sessions.open(), sessions.open()
    kv_events(first), kv_events(second)
    sessions.resync_kv(first)
    assert kv_events(first) == worker_pb2.KvEvents(sequence=2, cleared=True, stored=[1])
    sessions.announce_kv(worker_pb2.KvEvents(stored=[2]))
    assert kv_events(second) == worker_pb2.KvEvents(sequence=2, stored=[2])


def test_without_kv_events_nothing_is_told_of_pages() -> None:
    sessions = Sessions(Role.DECODE)
    session = sessions.open()
    sessions.announce_kv(worker_pb2.KvEvents(stored=[1]))
    sessions.resync_kv(session)
    assert not asyncio.run(session.next_batch()).HasField("kv_events")


def error_of(session: Session) -> worker_pb2.LegError:
    [output] = asyncio.run(session.next_batch()).outputs
    return output.error


def test_while_nothing_new_is_taken_a_leg_is_sent_elsewhere() -> None:
    sessions = Sessions(Role.DECODE)
    session = sessions.open()
    sessions.start(session, legs(1))
    sessions.closed_because = "an update"
    assert sessions.start(session, legs(2)) == []
    assert error_of(session).code == worker_pb2.ERROR_CODE_HANDED_BACK
    assert sessions.rooms() == [1]


def test_a_leg_for_weights_that_are_gone_is_sent_elsewhere() -> None:
    sessions = Sessions(Role.DECODE)
    sessions.compat = "new"
    session = sessions.open()
    assert sessions.start(session, [worker_pb2.StartLeg(room=1, compat="old")]) == []
    assert error_of(session).code == worker_pb2.ERROR_CODE_HANDED_BACK
    assert len(sessions.start(session, [worker_pb2.StartLeg(room=2, compat="new")])) == 1


def test_routers_hear_at_once_of_a_record_that_changed_in_more_than_its_load() -> None:
    sessions = Sessions(Role.DECODE)
    early = sessions.open()
    record = bootstrap_pb2.Instance(instance_id=5, load=bootstrap_pb2.WorkerLoad(num_running=1))
    sessions.set_record(record)
    late = sessions.open()
    told = [asyncio.run(session.next_batch()).instance for session in (early, late)]
    assert told == [bootstrap_pb2.Instance(instance_id=5)] * 2
    record.load.num_running = 2
    sessions.set_record(record)
    sessions.set_load(record.load)
    assert not asyncio.run(early.next_batch()).HasField("instance")
    record.paused = True
    sessions.set_record(record)
    assert asyncio.run(late.next_batch()).instance == bootstrap_pb2.Instance(instance_id=5, paused=True)


def test_sessions_are_idle_while_no_room_is_open_and_know_how_old_the_oldest_is() -> None:
    now_s = 10.0
    sessions = Sessions(Role.DECODE, clock=lambda: now_s)
    first, second = sessions.open(), sessions.open()
    assert (sessions.idle.is_set(), sessions.oldest_s) == (True, 0.0)
    sessions.start(first, legs(1))
    now_s = 13.0
    sessions.start(second, legs(2))
    assert (sessions.idle.is_set(), sessions.oldest_s) == (False, 3.0)
    sessions.close(first)
    assert (sessions.idle.is_set(), sessions.oldest_s) == (False, 0.0)
    sessions.deliver([worker_pb2.LegOutput(room=2, error=worker_pb2.LegError(code=worker_pb2.ERROR_CODE_HANDED_BACK))])
    assert sessions.idle.is_set()


def test_rooms_and_sessions_are_bounded() -> None:
    sessions = Sessions(Role.DECODE)
    opened = [sessions.open() for _ in range(MAX_SESSIONS)]
    with pytest.raises(Overloaded, match="256 routers have sessions here already"):
        sessions.open()
    assert sessions.close(opened.pop()) == []
    sessions.open()
    assert len(sessions.start(opened[0], legs(*range(1, MAX_OPEN_ROOMS + 2)))) == MAX_OPEN_ROOMS
    (refused,) = asyncio.run(opened[0].next_batch()).outputs
    assert (refused.room, refused.error.code) == (MAX_OPEN_ROOMS + 1, worker_pb2.ERROR_CODE_OVERLOADED)
    assert sessions.start(opened[1], legs(0xFFFF)) == []


def test_a_router_is_known_from_its_word_to_the_end_of_its_session() -> None:
    sessions = Sessions(Role.DECODE)
    silent, first, again = sessions.open(), sessions.open(), sessions.open()
    assert sessions.routers == frozenset()
    sessions.acknowledge(first, 7)
    sessions.acknowledge(again, 7)
    assert sessions.routers == {7}
    sessions.close(silent)
    sessions.close(first)
    assert sessions.routers == {7}
    sessions.close(again)
    assert sessions.routers == frozenset()
