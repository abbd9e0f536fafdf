"""Holds what one process believes about who is alive, merged from several bootstrap replicas. Pure.

The rules:

- An instance is listed while any connected replica lists it. Of the records that replicas report, the one with the
  highest sequence number holds.
- An instance that a lost or restarted replica had listed is *retained*: as long as no replica is connected, and for one
  lease after one is, so that workers can register again before they are missed. An explicit removal ends a retention.
- An instance that *ended* (it said goodbye, or was evicted) is not listed again, whatever a slower replica still says.
- Of instances at one address, the one that was started last is listed. Its predecessor is not listed for six leases
  after it was recognised as one: its late messages may still reach a replica that does not hear the newer one. If a
  clock was wrong, and the predecessor is the living one, a replica reports it then, and it is listed. Else it is
  forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from diptych.common.members.alarms import Alarms
from diptych.common.members.record import Record

P = TypeVar("P")

ENDED_MEMORY_S: Final = 60.0  # time in which a slower replica may still list what ended
SUPERSEDED_LEASES: Final = 6  # what is late of it is heard for one, told for another; more when replicas do not run
_sequence: Final = attrgetter("sequence")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[P]):
    """A replica is connected, and this is everything that it lists."""

    replica: int
    records: tuple[Record[P], ...]
    lease_s: float | None = None  # lease that the replica applies


@dataclass(frozen=True, slots=True)
class Update(Generic[P]):
    """What changed on a connected replica."""

    replica: int
    upserts: tuple[Record[P], ...] = ()
    removed: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()  # those of `removed` that never come back


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is no longer connected."""

    replica: int


@dataclass(frozen=True, slots=True)
class _Known(Generic[P]):
    """The newest record of an instance."""

    record: Record[P]
    is_told: bool  # a connected replica lists the instance; it is retained otherwise

    def supersedes(self, other: _Known[P]) -> bool:
        """Whether of the two, which are at one address, the other is its former self."""
        return self.record.started_ns > other.record.started_ns


class MembershipView(Generic[P]):
    """The merged view. Feed it events in the order of each replica's stream, and `expire` it at `next_deadline_s`."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s  # until a replica names its own
        self._replicas: dict[int, dict[int, Record[P]]] = {}  # connected ones only
        self._retained: dict[int, Record[P]] = {}
        self._retentions = Alarms()  # when they end; none while no replica is connected
        self._ended = Alarms()  # what ended, and until when that is remembered
        self._superseded = Alarms()  # former selves, and until when they are taken for that
        self._known: dict[int, _Known[P]] = {}  # all that are told or retained and have not ended
        self._at_address: dict[str, set[int]] = {}  # listed instances by address
        self._listed: dict[int, P] = {}

    @property
    def instances(self) -> Mapping[int, P]:
        """A live, read-only view: instance id to payload."""
        return MappingProxyType(self._listed)

    @property
    def retained(self) -> Mapping[int, P]:
        """Those of the listed that no connected replica lists."""
        return {key: value for key, value in self._listed.items() if not self._known[key].is_told}

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` is next due; None: not before another event."""
        deadlines = (self._retentions.next_s, self._ended.next_s, self._superseded.next_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def has_ended(self, instance_id: int) -> bool:
        """Whether a replica said of late that the instance ended, which is more than that it is missed."""
        return instance_id in self._ended

    def apply(self, event: Snapshot[P] | Update[P] | Lost, now_s: float) -> bool:
        """Take in an event; return whether `instances` changed."""
        match event:
            case Snapshot(replica, records, lease_s):
                self._lease_s = lease_s or self._lease_s
                touched = self._retain(replica)
                self._replicas[replica] = {}
                touched |= self._upsert(replica, records)
                self._set_retentions(now_s)
            case Update(replica, upserts, removed, ended):
                self._end(ended, now_s)
                touched = self._upsert(replica, upserts) | self._remove(replica, removed) | set(ended)
            case Lost(replica):
                touched = self._retain(replica)
                self._set_retentions(now_s)
        return self._settle(touched, now_s)

    def expire(self, now_s: float) -> bool:
        """Forget what was retained long enough; return whether `instances` changed."""
        for instance_id in self._ended.pop_due(now_s):
            if any(instance_id in listed for listed in self._replicas.values()):
                self._end([instance_id], now_s)
        due, superseded = self._retentions.pop_due(now_s), self._superseded.pop_due(now_s)
        self._forget([*due, *filter(self._is_only_retained, superseded)])  # a former self of which nobody tells is dead
        return self._settle([*due, *superseded], now_s)

    def _retain(self, replica: int) -> set[int]:
        lost = self._replicas.pop(replica, {})
        for instance_id, record in lost.items():
            self._retained[instance_id] = max(record, self._retained.get(instance_id, record), key=_sequence)
            self._retentions.drop(instance_id)  # it was listed until now: a lease of before does not count
        return set(lost)

    def _set_retentions(self, now_s: float) -> None:
        """Retentions begin to end when a replica is connected, and are suspended when the last one is lost."""
        for instance_id in self._retained:
            if not self._replicas:
                self._retentions.drop(instance_id)
            elif instance_id not in self._retentions:
                self._retentions.set(instance_id, now_s + self._lease_s)

    def _upsert(self, replica: int, records: Collection[Record[P]]) -> set[int]:
        listed = self._replicas[replica]
        for record in records:
            listed[record.instance_id] = record
            if self._retained.get(record.instance_id, record).sequence <= record.sequence:
                self._forget([record.instance_id])
        return {record.instance_id for record in records}

    def _remove(self, replica: int, removed: Iterable[int]) -> set[int]:
        touched = set(removed)
        for instance_id in touched:
            self._replicas[replica].pop(instance_id, None)
        self._forget(touched)
        return touched

    def _end(self, ended: Iterable[int], now_s: float) -> None:
        for instance_id in ended:
            self._ended.set(instance_id, now_s + ENDED_MEMORY_S)

    def _forget(self, instance_ids: Iterable[int]) -> None:
        for instance_id in instance_ids:
            if self._retained.pop(instance_id, None):
                self._retentions.drop(instance_id)

    def _settle(self, touched: Collection[int], now_s: float) -> bool:
        """Bring what is listed up to date with what is known of the instances in `touched`."""
        addresses = {address for instance_id in touched for address in self._learn(instance_id)}
        neighbours = {each for address in addresses for each in self._at_address.get(address, ())}
        for instance_id in neighbours:
            if self._is_superseded(self._known[instance_id]):
                self._superseded.set(instance_id, now_s + SUPERSEDED_LEASES * self._lease_s)
        return any([self._list(instance_id) for instance_id in neighbours.union(touched)])

    def _learn(self, instance_id: int) -> set[str]:
        """Bring what is known of an instance up to date; return the addresses that are concerned."""
        before, after = self._known.pop(instance_id, None), self._find(instance_id)
        if before is not None:
            here = self._at_address[before.record.address]
            here.discard(instance_id)
            if not here:
                del self._at_address[before.record.address]
        if after is not None:
            self._known[instance_id] = after
            self._at_address.setdefault(after.record.address, set()).add(instance_id)
        return {known.record.address for known in (before, after) if known is not None}

    def _list(self, instance_id: int) -> bool:
        before = self._listed.pop(instance_id, None)
        known = self._known.get(instance_id)
        if known is not None and instance_id not in self._superseded:
            self._listed[instance_id] = known.record.payload
        return before != self._listed.get(instance_id)

    def _is_superseded(self, known: _Known[P]) -> bool:
        return any(self._known[other].supersedes(known) for other in self._at_address[known.record.address])

    def _is_only_retained(self, instance_id: int) -> bool:
        known = self._known.get(instance_id)
        return known is not None and not known.is_told

    def _find(self, instance_id: int) -> _Known[P] | None:
        if instance_id in self._ended:
            return None
        told = [listed[instance_id] for listed in self._replicas.values() if instance_id in listed]
        retained = [self._retained[instance_id]] if instance_id in self._retained else []
        newest = max((*told, *retained), key=_sequence, default=None)
        return None if newest is None else _Known(newest, is_told=bool(told))
