"""Whatever comes: refused with a reason or taken in, and nobody else is touched."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.bootstrap.announcement import MAX_NAME_CHARS, MAX_TEXT_CHARS, read_heartbeat
from diptych.bootstrap.caller import BURST, HEARTBEATS_PER_S, Limits, Pace
from diptych.bootstrap.replica import Replica
from diptych.common.errors import InvalidRequest, Overloaded
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_READY,
    ROLE_PREFILL,
    Heartbeat,
    Instance,
    LoraAdapter,
    Terms,
    WatchUpdate,
    WorkerLoad,
)

BYSTANDER = Instance(instance_id=1, role=ROLE_PREFILL, address="here:1", state=INSTANCE_STATE_READY)


def beat(instance: Instance, sequence: int = 1) -> bytes:
    return Heartbeat(sequence=sequence, instance=instance).SerializeToString()


def ready(instance_id: int, **fields: Any) -> Instance:
    usual: dict[str, Any] = {"role": ROLE_PREFILL, "address": f"there:{instance_id}", "state": INSTANCE_STATE_READY}
    return Instance(instance_id=instance_id, **{**usual, **fields})


@pytest.fixture
def replica() -> Replica:
    return new_replica()


def new_replica() -> Replica:
    replica = Replica(lease_s=3.0, limits=Limits(max_instances=3, max_watchers=2))
    replica.receive(beat(BYSTANDER), 0.0)
    return replica


def listed(replica: Replica) -> dict[int, Instance]:
    outbox = replica.open(with_loads=True)
    update = WatchUpdate.FromString(replica.pop(outbox))
    replica.close(outbox)
    return {instance.instance_id: instance for instance in update.upserts}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"address": ""}, "needs instance_id, role and address"),
        ({"address": "a:1\nERROR forged line"}, "control characters"),
        ({"terms": Terms(kv_shape="30 layers\x1b[2J")}, "control characters"),
        ({"not_ready": "no peer\nERROR forged line"}, "control characters"),
        ({"loras": [LoraAdapter(name="\x9b2J")]}, "control characters"),
        ({"terms": Terms(kv_backend="u" * (MAX_NAME_CHARS + 1))}, "kv_backend has more than 256 characters"),
        ({"address": "a" * (MAX_NAME_CHARS + 1)}, "address has more than 256 characters"),
        ({"model_id": "m" * (MAX_TEXT_CHARS + 1)}, "model_id has more than 4096 characters"),
        ({"state": 0}, "state 0 is unknown"),
    ],
)
def test_a_bad_record_is_refused_with_a_reason(replica: Replica, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        replica.receive(beat(ready(2, **fields)), 0.0)
    assert listed(replica).keys() == {1}


def test_what_is_no_heartbeat_is_refused(replica: Replica) -> None:
    with pytest.raises(InvalidRequest, match=r"no diptych\.v1\.Heartbeat"):
        replica.receive(b"\xff", 0.0)


def test_a_role_of_a_later_version_is_listed_like_any_other(replica: Replica) -> None:
    later = ready(2).SerializeToString() + b"\x10\x63"  # role 99
    replica.receive(Heartbeat(sequence=1).SerializeToString() + b"\x12" + bytes([len(later)]) + later, 0.0)
    assert listed(replica).keys() == {1, 2}


def test_more_instances_than_fit_are_refused_until_one_leaves(replica: Replica) -> None:
    replica.receive(beat(ready(2)), 0.0)
    replica.receive(beat(ready(3)), 0.0)
    with pytest.raises(Overloaded, match="3 instances are listed: no more fit"):
        replica.receive(beat(ready(4)), 0.0)
    replica.receive(beat(ready(1, address="here:1"), sequence=2), 2.0)
    replica.tick(3.0)
    replica.receive(beat(ready(4)), 3.0)
    assert listed(replica).keys() == {1, 4}


def test_more_watchers_than_fit_are_refused(replica: Replica) -> None:
    replica.open(with_loads=True)
    outbox = replica.open(with_loads=False)
    with pytest.raises(Overloaded, match="2 watchers are served"):
        replica.open(with_loads=False)
    replica.close(outbox)
    replica.open(with_loads=False)


def test_loads_alone_are_told_in_turns_to_those_who_want_them(replica: Replica) -> None:
    with_loads, without = replica.open(with_loads=True), replica.open(with_loads=False)
    for outbox in (with_loads, without):
        replica.pop(outbox)
    replica.receive(beat(ready(1, address="here:1", load=WorkerLoad(num_running=7)), sequence=2), 1.0)
    told = [outbox for _ in range(10) for outbox in replica.announce_loads()]
    assert (told, without.is_empty) == ([with_loads], True)
    news = WatchUpdate.FromString(replica.pop(with_loads)).loads
    assert [(each.instance_id, each.sequence, each.load.num_running) for each in news] == [(1, 2, 7)]


def test_a_snapshot_tells_no_loads_to_those_who_do_not_want_them(replica: Replica) -> None:
    replica.receive(beat(ready(2, load=WorkerLoad(num_running=7, linked_instances=[1]))), 0.0)
    update = WatchUpdate.FromString(replica.pop(replica.open(with_loads=False)))
    assert [(each.instance_id, each.HasField("load")) for each in update.upserts] == [(1, False), (2, False)]


def test_what_is_sent_on_is_what_was_said(replica: Replica) -> None:
    instance = ready(2, load=WorkerLoad(num_running=7), version="later", dp_rank=3)
    said = Instance.FromString(instance.SerializeToString() + b"\xf8\x3f\x05")  # a field of a later version
    replica.receive(beat(said, sequence=9), 0.0)
    said.sequence = 9
    assert listed(replica)[2].SerializeToString(deterministic=True) == said.SerializeToString(deterministic=True)


def test_a_stream_may_not_flood_us() -> None:
    pace = Pace(0.0)
    for _ in range(BURST):
        pace.count(0.0)
    with pytest.raises(Overloaded, match="more than 50 heartbeats a second"):
        pace.count(0.0)
    later = Pace(0.0)
    for number in range(10 * BURST):
        later.count(number / HEARTBEATS_PER_S)


# Fuzz

values: dict[str, st.SearchStrategy[Any]] = {
    "instance_id": st.integers(0, 4),
    "role": st.integers(0, 6),
    "state": st.integers(0, 6),
    "address": st.sampled_from(["", "here:1", "there:2", "\0", "a" * 300]) | st.text(max_size=20),
    "model_id": st.text(max_size=20),
    "not_ready": st.text(max_size=5000),
    "dp_rank": st.integers(0, 2**32 - 1),
    "started_unix_ns": st.integers(0, 2**64 - 1),
    "paused": st.booleans(),
    "load": st.builds(WorkerLoad, num_running=st.integers(0, 9), linked_instances=st.lists(st.integers(0, 9))),
}
instances = st.fixed_dictionaries({}, optional=values).map(lambda fields: Instance(**fields))
beats = st.builds(beat, instances, st.integers(0, 2**64 - 1))
mutated = st.builds(
    lambda data, at, noise: data[: at % (len(data) + 1)] + noise + data[at % (len(data) + 1) + len(noise) :],
    beats,
    st.integers(0, 5000),
    st.binary(max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(beats | mutated | st.binary(max_size=200), max_size=20))
def test_no_bytes_harm_the_replica_or_a_bystander(messages: list[bytes]) -> None:
    replica = new_replica()
    outbox = replica.open(with_loads=True)
    for number, data in enumerate(messages):
        with contextlib.suppress(InvalidRequest, Overloaded):  # to refuse is the least harm
            record = read_heartbeat(data)
            if record.instance_id != 1 and record.address != "here:1":
                replica.receive(data, number / 100)
        replica.announce_loads()
        WatchUpdate.FromString(replica.pop(outbox))
    bystander = listed(replica)[1]
    bystander.ClearField("sequence")
    assert bystander == BYSTANDER
    assert len(listed(replica)) <= 3
    replica.tick(1000.0)
    assert listed(replica) == {}
