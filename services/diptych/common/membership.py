"""What one process believes about who is alive, merged from several bootstrap replicas. Pure: no sockets, no clock.

The rule: an instance is listed while any connected replica lists it, in the furthest state that any of them has heard.
What a lost or restarted replica had listed is *retained*: as long as no replica is connected, and for one lease after
one is, so that workers can register again before they are missed. An explicit removal, or a newer instance at the same
address, ends a retention at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

P = TypeVar("P")


class State(enum.IntEnum):
    """What an instance announces. It only ever moves forward; the numbers are those of the protocol."""

    STARTING = 1  # registered, not yet able to serve
    READY = 2
    DRAINING = 3  # finishes what it has, takes nothing new
    GONE = 4  # said goodbye


@dataclass(frozen=True, slots=True)
class Record(Generic[P]):
    """What an instance says of itself."""

    instance_id: int  # random, never 0, new at every start
    address: str  # host:port, or host:port#rank; belongs to the newest instance that names it
    state: State
    payload: P  # everything else


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[P]):
    """A replica is connected, and this is everything that it lists."""

    replica: int
    records: tuple[Record[P], ...]


@dataclass(frozen=True, slots=True)
class Update(Generic[P]):
    """What changed on a connected replica."""

    replica: int
    upserts: tuple[Record[P], ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is no longer connected."""

    replica: int


@dataclass(frozen=True, slots=True)
class _Heard(Generic[P]):
    record: Record[P]
    arrival: int  # rising: of two records in the same state the later arrival is the newer


@dataclass(frozen=True, slots=True)
class _Retained(Generic[P]):
    heard: _Heard[P]
    until_s: float | None  # None: no replica is connected


class MembershipView(Generic[P]):
    """The merged view. Feed it events in the order of each replica's stream, and `expire` it at `next_deadline_s`."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._replicas: dict[int, dict[int, _Heard[P]]] = {}  # connected ones only
        self._retained: dict[int, _Retained[P]] = {}
        self._merged: dict[int, P] = {}
        self._num_arrivals = 0

    @property
    def instances(self) -> Mapping[int, P]:
        """A live, read-only view: instance id to payload."""
        return MappingProxyType(self._merged)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` is next due; None: not before another event."""
        return min((item.until_s for item in self._retained.values() if item.until_s is not None), default=None)

    def apply(self, event: Snapshot[P] | Update[P] | Lost, now_s: float) -> bool:
        """Take in an event; return whether `instances` changed."""
        match event:
            case Snapshot(replica, records):
                touched = self._retain(self._replicas.pop(replica, {}))
                self._replicas[replica] = {}
                touched |= self._upsert(replica, records)
            case Update(replica, upserts, removed):
                touched = self._upsert(replica, upserts) | self._remove(replica, removed)
            case Lost(replica):
                touched = self._retain(self._replicas.pop(replica, {}))
        self._set_deadlines(now_s)
        return self._merge(touched)

    def expire(self, now_s: float) -> bool:
        """Forget what was retained long enough; return whether `instances` changed."""
        due = {
            instance_id
            for instance_id, retained in self._retained.items()
            if retained.until_s is not None and retained.until_s <= now_s
        }
        self._forget(due)
        return self._merge(due)

    def _retain(self, listed: Mapping[int, _Heard[P]]) -> set[int]:
        for instance_id, heard in listed.items():
            self._retained[instance_id] = _Retained(heard, until_s=None)
        return set(listed)

    def _upsert(self, replica: int, records: Iterable[Record[P]]) -> set[int]:
        touched = set()
        listed = self._replicas[replica]
        for record in records:
            self._num_arrivals += 1
            listed[record.instance_id] = _Heard(record, self._num_arrivals)
            touched |= {record.instance_id} | self._replaced_by(record)
        self._forget(touched)
        return touched

    def _replaced_by(self, record: Record[P]) -> set[int]:
        return {i for i, retained in self._retained.items() if retained.heard.record.address == record.address}

    def _remove(self, replica: int, removed: Iterable[int]) -> set[int]:
        touched = set(removed)
        for instance_id in touched:
            self._replicas[replica].pop(instance_id, None)
        self._forget(touched)
        return touched

    def _forget(self, instance_ids: Iterable[int]) -> None:
        for instance_id in instance_ids:
            self._retained.pop(instance_id, None)

    def _set_deadlines(self, now_s: float) -> None:
        for instance_id, retained in self._retained.items():
            if not self._replicas:
                self._retained[instance_id] = replace(retained, until_s=None)
            elif retained.until_s is None:
                self._retained[instance_id] = replace(retained, until_s=now_s + self._lease_s)

    def _merge(self, touched: Iterable[int]) -> bool:
        changed = False
        for instance_id in touched:
            before = self._merged.pop(instance_id, None)
            heard = self._newest(instance_id)
            if heard is not None:
                self._merged[instance_id] = heard.record.payload
            changed |= before != self._merged.get(instance_id)
        return changed

    def _newest(self, instance_id: int) -> _Heard[P] | None:
        heard = [listed[instance_id] for listed in self._replicas.values() if instance_id in listed]
        if instance_id in self._retained:
            heard.append(self._retained[instance_id].heard)
        return max(heard, key=lambda item: (item.record.state, item.arrival), default=None)
