"""Workers as the console is told of them, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.router.console.fleet.worker_facts import WorkerFacts
from diptych.router.workers.known_worker import KnownWorker
from diptych.v1 import worker_pb2
from diptych.v1.bootstrap_pb2 import Instance, WorkerLoad

MODEL_ID = "tiny"
TERMS = Terms(weights="w", vocab_size=100, kv_shape="2 layers", kv_backend="ucx", oldest_protocol=1, newest_protocol=1)


def facts(
    instance_id: int,
    role: Role,
    linked: Iterable[int] = (),
    *,
    terms: Terms = TERMS,
    load: WorkerLoad | None = None,
    is_reached: bool = True,
    record: dict[str, Any] | None = None,
    **known: Any,
) -> WorkerFacts:
    """Return a worker that is ready, with other fields of its record or of what is known where they are given."""
    fields = {"state": State.READY, "model_id": MODEL_ID, "compat": terms.compat, "version": "1.0", **(record or {})}
    instance = Instance(instance_id=instance_id, role=role.wire, address=f"host:{instance_id}", **fields)
    instance.terms.CopyFrom(terms_to_wire(terms))
    instance.transfer.layout.page_size = 16
    if load is not None:
        instance.load.CopyFrom(load)
    instance.load.linked_instances[:] = sorted(linked)
    worker = KnownWorker(instance)
    return WorkerFacts(instance, instance.load, worker.view(is_reached=is_reached), worker.reported, **known)


def link(peer: int, state: worker_pb2.LinkState = worker_pb2.LINK_STATE_UP, **fields: Any) -> worker_pb2.LinkStatus:
    return worker_pb2.LinkStatus(peer_instance_id=peer, state=state, **fields)
