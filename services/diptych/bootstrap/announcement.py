"""Keeps what an instance says of itself: read from the wire, and passed on as bytes. Pure.

A change is serialised once for all watchers; they get it by concatenation, which for protobuf is merging. A message
that can't be a record is refused here, before it touches anything.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from diptych.bootstrap.caller import ANYBODY, Caller
from diptych.common.errors import InvalidRequest
from diptych.common.members.instances import place_of
from diptych.common.members.record import Record, State
from diptych.v1.bootstrap_pb2 import Heartbeat, Instance, LoadNews, WatchUpdate

MAX_NAME_CHARS: Final = 256
MAX_TEXT_CHARS: Final = 4096  # for texts that people read, and for paths that name a model

_NAMES: Final = ("address", "compat", "version", "metrics_address")
_TEXTS: Final = ("model_id", "started_as", "not_ready")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # they would forge lines in logs and on terminals
_STATES: Final = frozenset(map(int, State))


@dataclass(frozen=True, slots=True)
class Announcement:
    """An Instance, without load and sequence."""

    whole: bytes
    without_key: bytes = field(compare=False)  # nor what a link to it takes
    role: int = field(compare=False)


def read_heartbeat(data: bytes, caller: Caller = ANYBODY) -> Record[Announcement]:
    """Return the record. Raises `InvalidRequest`, and `Forbidden` if the caller may not speak for this instance."""
    try:
        heartbeat = Heartbeat.FromString(data)
    except DecodeError:
        raise InvalidRequest("this is no diptych.v1.Heartbeat") from None
    instance = heartbeat.instance
    _check(instance)
    caller.check(instance)
    load = instance.load.SerializeToString()
    instance.ClearField("load")
    instance.ClearField("sequence")
    return Record(
        instance.instance_id,
        place_of(instance),
        State(instance.state),
        _said(instance),
        instance.started_unix_ns,
        heartbeat.sequence,
        load,
    )


def _said(instance: Instance) -> Announcement:
    whole = instance.SerializeToString(deterministic=True)
    if not (instance.transfer.engine_metadata or instance.transfer.HasField("weights_door")):
        return Announcement(whole, whole, instance.role)
    instance.transfer.ClearField("engine_metadata")
    instance.transfer.ClearField("weights_door")
    return Announcement(whole, instance.SerializeToString(deterministic=True), instance.role)


def instance_of(record: Record[Announcement]) -> Instance:
    """Return the Instance, without load and sequence."""
    return Instance.FromString(record.payload.whole)


def upsert_chunk(record: Record[Announcement], *, roles: Container[int] | None = None) -> bytes:
    """Return a WatchUpdate that tells a record, and its link key if its role is one of `roles`; None: any."""
    said = record.payload
    payload = said.whole if roles is None or said.role in roles else said.without_key
    load = _nested(Instance.LOAD_FIELD_NUMBER, record.load) if record.load else b""
    sequence = Instance(sequence=record.sequence).SerializeToString()
    return _nested(WatchUpdate.UPSERTS_FIELD_NUMBER, payload + load + sequence)


def load_chunk(record: Record[Announcement]) -> bytes:
    """Return a WatchUpdate that tells how busy an instance is."""
    news = LoadNews(instance_id=record.instance_id, sequence=record.sequence).SerializeToString()
    return _nested(WatchUpdate.LOADS_FIELD_NUMBER, news + _nested(LoadNews.LOAD_FIELD_NUMBER, record.load))


def _check(instance: Instance) -> None:
    if not instance.instance_id or not instance.address or not instance.role:
        raise InvalidRequest("a heartbeat needs instance_id, role and address")
    if instance.state not in _STATES:
        raise InvalidRequest(f"state {instance.state} is unknown to this version")
    names = _names(instance)
    texts = {name: getattr(instance, name) for name in _TEXTS}
    for limit, said in ((MAX_NAME_CHARS, names), (MAX_TEXT_CHARS, texts)):
        for name, words in said.items():
            if len(words) > limit:
                raise InvalidRequest(f"{name} has more than {limit} characters")
    adapters = (words for adapter in instance.loras for words in (adapter.name, adapter.fingerprint))
    if _CONTROLS.search("".join((*names.values(), *texts.values(), *adapters))):
        raise InvalidRequest("a record can't have control characters")


def _names(instance: Instance) -> dict[str, str]:
    terms = instance.terms
    regions = instance.transfer.layout.regions
    return {
        **{name: getattr(instance, name) for name in _NAMES},
        "weights": terms.weights,
        "kv_shape": terms.kv_shape,
        "kv_backend": terms.kv_backend,
        **{f"dtype of KV region {i}": region.dtype for i, region in enumerate(regions)},
        **{f"reach of KV region {i}": region.reach for i, region in enumerate(regions)},
    }


def _nested(number: int, message: bytes) -> bytes:
    """Return a message as a field of another: numbers below 16 take a byte."""
    return bytes((number << 3 | 2,)) + _varint(len(message)) + message


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)
