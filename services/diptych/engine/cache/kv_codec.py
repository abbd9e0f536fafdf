"""News of cached pages to and from protobuf: a scheduler tells its frontend, and that all routers."""

from __future__ import annotations

from diptych.engine.cache.cache_changes import CacheDelta
from diptych.engine.cache.kv_feed import KvMessage
from diptych.v1 import worker_pb2


def delta_to_wire(delta: CacheDelta) -> worker_pb2.KvEvents:
    wire = worker_pb2.KvEvents(stored=delta.stored, removed=delta.removed, cleared=delta.cleared)
    for level, hashes in delta.below:
        wire.below.add(level=level, stored=hashes)
    return wire


def delta_from_wire(wire: worker_pb2.KvEvents) -> CacheDelta:
    below = tuple([(each.level, tuple(each.stored)) for each in wire.below])
    return CacheDelta(wire.cleared, tuple(wire.removed), tuple(wire.stored), below)


def kv_message_to_wire(message: KvMessage) -> worker_pb2.KvEvents:
    wire = delta_to_wire(message.delta)
    wire.sequence, wire.more = message.sequence, message.more
    return wire
