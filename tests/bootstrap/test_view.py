"""Whose link keys each watcher is told: the real replica, and every change in the order of the streams."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.bootstrap.announcement import upsert_chunk
from diptych.bootstrap.caller import ANYBODY, WATCHERS_EACH, Caller, Limits
from diptych.bootstrap.replica import Replica
from diptych.common.errors import Forbidden, Overloaded
from diptych.common.trust.instance_secret import InstanceSecret
from diptych.common.verdicts.permissions import Parties, Party
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_GONE,
    INSTANCE_STATE_READY,
    ROLE_DECODE,
    ROLE_ENCODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    ROLE_UNIFIED,
    Heartbeat,
    Instance,
    WatchUpdate,
)

WORKER = frozenset({Party.WORKER})
FLEET = {1: ROLE_PREFILL, 2: ROLE_DECODE, 3: ROLE_UNIFIED, 4: ROLE_ROUTER}  # by instance id


def member(instance_id: int, role: Any, **fields: Any) -> Instance:
    usual: dict[str, Any] = {"address": f"there:{instance_id}", "state": INSTANCE_STATE_READY}
    made = Instance(instance_id=instance_id, role=role, **(usual | fields))
    made.transfer.layout.page_size = 16
    if role != ROLE_ROUTER:
        made.transfer.engine_metadata = f"key {instance_id}".encode()
    return made


@pytest.fixture
def replica() -> Replica:
    """The fleet is listed."""
    replica = Replica(lease_s=3.0, limits=Limits())
    for instance_id, role in FLEET.items():
        register(replica, member(instance_id, role))
    return replica


def register(replica: Replica, instance: Instance, caller: Caller = ANYBODY, sequence: int = 1) -> None:
    replica.receive(Heartbeat(sequence=sequence, instance=instance).SerializeToString(), 0.0, caller)


@pytest.mark.parametrize("parties", [frozenset({each}) for each in Party])
@pytest.mark.parametrize("with_loads", [True, False])
def test_who_is_no_worker_sees_everybody_and_no_link_key(replica: Replica, parties: Parties, with_loads: bool) -> None:
    outbox = replica.open(with_loads=with_loads, caller=Caller(parties, proven=frozenset()))
    told = [replica.pop(outbox)]
    register(replica, member(5, ROLE_PREFILL))
    register(replica, member(1, ROLE_PREFILL, paused=True), sequence=2)
    told.append(replica.pop(outbox))
    updates = [WatchUpdate.FromString(each) for each in told]
    assert [[each.instance_id for each in update.upserts] for update in updates] == [[*FLEET], [5, 1]]
    assert not any(b"key " in each for each in told)
    assert updates[0].upserts[0].transfer.layout.page_size == 16, "routers need it"


def keys_in(data: bytes) -> set[int]:
    """The listed ids whose link key is in an update."""
    upserts = WatchUpdate.FromString(data).upserts
    return {each.instance_id for each in upserts if each.transfer.engine_metadata}


@pytest.mark.parametrize(
    ("role", "seen"),
    [(ROLE_PREFILL, {1, 2, 3}), (ROLE_DECODE, {1, 2, 3}), (ROLE_UNIFIED, {1, 2, 3}), (ROLE_ROUTER, set())],
)
def test_a_worker_sees_the_keys_of_those_that_it_may_link_to(replica: Replica, role: Any, seen: set[int]) -> None:
    secret = InstanceSecret.new()
    party = Party.ROUTER if role == ROLE_ROUTER else Party.WORKER
    caller = Caller(frozenset({party}), proven=frozenset({secret.instance_id}))
    register(replica, member(secret.instance_id, role), caller)
    outbox = replica.open(with_loads=False, caller=caller)
    assert keys_in(replica.pop(outbox)) - {secret.instance_id} == seen
    for instance_id in (5, 6, 7):
        register(replica, member(instance_id, FLEET[instance_id - 4]))
    assert keys_in(replica.pop(outbox)) == {instance_id + 4 for instance_id in seen}


def test_who_is_everybody_sees_all_keys(replica: Replica) -> None:
    assert keys_in(replica.pop(replica.open(with_loads=False))) == {1, 2, 3}


def test_nothing_is_told_to_a_worker_before_it_has_registered(replica: Replica) -> None:
    secret = InstanceSecret.new()
    caller = Caller(WORKER, proven=frozenset({secret.instance_id}))
    outbox = replica.open(with_loads=False, caller=caller)
    register(replica, member(5, ROLE_PREFILL))
    assert not replica.may_pop(outbox)
    register(replica, member(secret.instance_id, ROLE_DECODE), caller)
    assert replica.may_pop(outbox)
    assert keys_in(replica.pop(outbox)) == {1, 2, 3, 5, secret.instance_id}


def test_a_worker_that_changes_its_role_sees_what_it_needs_and_hears_of_the_roles_of_others(replica: Replica) -> None:
    secret = InstanceSecret.new()
    ours, caller = secret.instance_id, Caller(WORKER, proven=frozenset({secret.instance_id}))
    register(replica, member(6, ROLE_ENCODE))
    register(replica, member(ours, ROLE_UNIFIED), caller)
    outbox = replica.open(with_loads=False, caller=caller)
    assert keys_in(replica.pop(outbox)) == {1, 2, 3, 6, ours}
    register(replica, member(ours, ROLE_PREFILL), caller, sequence=2)
    (only,) = WatchUpdate.FromString(replica.pop(outbox)).upserts
    assert only.instance_id == ours, "workers of either role see the same: nobody is told again"
    register(replica, member(ours, ROLE_DECODE), caller, sequence=3)
    assert keys_in(replica.pop(outbox)) == {1, 2, 3, ours}, "who decodes has nothing to do with who encodes"
    register(replica, member(1, ROLE_DECODE), sequence=2)
    assert keys_in(replica.pop(outbox)) == {1}, "a peer's role counts, too"


def test_the_groups_of_a_worker_see_what_each_of_them_needs(replica: Replica) -> None:
    secrets = [InstanceSecret.new() for _ in range(2)]
    caller = Caller(WORKER, proven=frozenset(each.instance_id for each in secrets))
    for secret, role in zip(secrets, (ROLE_DECODE, ROLE_PREFILL), strict=True):
        register(replica, member(secret.instance_id, role), caller)
    outbox = replica.open(with_loads=False, caller=caller)
    assert keys_in(replica.pop(outbox)) == {1, 2, 3, *caller.proven}
    replica.close(outbox)
    register(replica, member(secrets[0].instance_id, ROLE_UNIFIED), caller, sequence=2)  # nobody watches any more


def test_a_worker_neither_registers_a_router_nor_ends_another_worker(replica: Replica) -> None:
    secret = InstanceSecret.new()
    worker = Caller(WORKER, "10.0.0.9", frozenset({secret.instance_id}))
    router = Caller(frozenset({Party.ROUTER}), "10.0.0.9", frozenset({secret.instance_id}))
    for caller, instance in (
        (worker, member(secret.instance_id, ROLE_ROUTER)),
        (router, member(secret.instance_id, ROLE_DECODE)),
        (worker, member(1, ROLE_PREFILL, state=INSTANCE_STATE_GONE)),
        (worker, member(1, ROLE_PREFILL, address="there:9")),
        (Caller(frozenset({Party.OPERATOR})), member(7, ROLE_PREFILL)),
    ):
        with pytest.raises(Forbidden):
            register(replica, instance, caller, sequence=99)
    listed = WatchUpdate.FromString(replica.pop(replica.open(with_loads=False))).upserts
    assert [each.instance_id for each in listed] == [*FLEET]
    assert replica.snapshot().counts.refused == 5


def test_a_fleet_that_comes_back_to_a_replica_costs_a_few_encodings_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(record: Any, **options: Any) -> bytes:
        encoded.append(record.instance_id)
        return upsert_chunk(record, **options)

    monkeypatch.setattr("diptych.bootstrap.replica.upsert_chunk", counted)
    replica, secrets = Replica(lease_s=3.0, limits=Limits()), [InstanceSecret.new() for _ in range(100)]
    callers = [Caller(WORKER, proven=frozenset({each.instance_id})) for each in secrets]
    outboxes = [replica.open(with_loads=False, caller=caller) for caller in callers]
    for number, (secret, caller) in enumerate(zip(secrets, callers, strict=True)):
        register(replica, member(secret.instance_id, (ROLE_PREFILL, ROLE_DECODE)[number % 2]), caller)
    assert len(encoded) <= 3 * len(secrets), "once for those that see the same"
    assert [len(keys_in(replica.pop(outbox))) for outbox in outboxes] == [100] * 100


def test_an_instance_has_few_watchers_and_others_have_theirs(replica: Replica) -> None:
    one, other = (Caller(WORKER, proven=frozenset({InstanceSecret.new().instance_id})) for _ in range(2))
    outboxes = [replica.open(with_loads=False, caller=one) for _ in range(WATCHERS_EACH)]
    with pytest.raises(Overloaded, match="16 watchers of this instance"):
        replica.open(with_loads=False, caller=one)
    replica.open(with_loads=False, caller=other)
    replica.close(outboxes[0])
    replica.open(with_loads=False, caller=one)
