"""Decides who is alive: heartbeats and the passing of time in, changes for the watchers out. No sockets, no clock.

Rules: an instance lives as long as its lease, which every heartbeat renews. Only a heartbeat with a higher sequence
number counts. Of two instances that name the same address, the one that registered first is evicted, and stays so
however late its heartbeats come; a goodbye claims no address. What left is remembered for `memory_s`, so that a
delayed message cannot revive it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from diptych.common.errors import InvalidTransition
from diptych.common.membership import Record, State

P = TypeVar("P")


class Standing(enum.Enum):
    """How bootstrap regards an instance."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EXPIRED = "expired"  # its lease ran out; a heartbeat brings it back
    EVICTED = "evicted"  # a newer instance has its address; final
    GONE = "gone"  # said goodbye; final


class Event(enum.Enum):
    """What can happen to an instance."""

    SAYS_STARTING = "says starting"
    SAYS_READY = "says ready"
    SAYS_DRAINING = "says draining"
    SAYS_GONE = "says gone"
    LEASE_ENDED = "lease ended"
    REPLACED = "replaced"


LISTED: Final = frozenset({Standing.STARTING, Standing.READY, Standing.DRAINING})

TRANSITIONS: Final[Mapping[tuple[Standing, Event], Standing]] = {
    (Standing.UNKNOWN, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.UNKNOWN, Event.SAYS_READY): Standing.READY,
    (Standing.UNKNOWN, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.UNKNOWN, Event.SAYS_GONE): Standing.GONE,
    (Standing.STARTING, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.STARTING, Event.SAYS_READY): Standing.READY,
    (Standing.STARTING, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.STARTING, Event.SAYS_GONE): Standing.GONE,
    (Standing.STARTING, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.STARTING, Event.REPLACED): Standing.EVICTED,
    (Standing.READY, Event.SAYS_READY): Standing.READY,
    (Standing.READY, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.READY, Event.SAYS_GONE): Standing.GONE,
    (Standing.READY, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.READY, Event.REPLACED): Standing.EVICTED,
    (Standing.DRAINING, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.DRAINING, Event.SAYS_GONE): Standing.GONE,
    (Standing.DRAINING, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.DRAINING, Event.REPLACED): Standing.EVICTED,
    (Standing.EXPIRED, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.EXPIRED, Event.SAYS_READY): Standing.READY,
    (Standing.EXPIRED, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.EXPIRED, Event.SAYS_GONE): Standing.GONE,
    (Standing.EXPIRED, Event.REPLACED): Standing.EVICTED,
    **{(Standing.EVICTED, event): Standing.EVICTED for event in Event if event is not Event.LEASE_ENDED},
    **{(Standing.GONE, event): Standing.GONE for event in Event if event is not Event.LEASE_ENDED},
}

_SAYS: Final[Mapping[State, Event]] = {
    State.STARTING: Event.SAYS_STARTING,
    State.READY: Event.SAYS_READY,
    State.DRAINING: Event.SAYS_DRAINING,
    State.GONE: Event.SAYS_GONE,
}


@dataclass(frozen=True, slots=True)
class Heartbeat(Generic[P]):
    """An instance has spoken."""

    record: Record[P]
    sequence: int  # strictly rising within an instance


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Move(Generic[P]):
    """An instance's standing changed."""

    record: Record[P]
    before: Standing
    after: Standing


@dataclass(frozen=True, slots=True)
class Delta(Generic[P]):
    """What follows from an event."""

    upserts: tuple[Record[P], ...] = ()  # for the watchers
    removed: tuple[int, ...] = ()  # for the watchers
    evicted: bool = False  # for the sender of the heartbeat: its address belongs to a newer instance
    moves: tuple[Move[P], ...] = ()  # for the log


@dataclass(slots=True)
class _Member(Generic[P]):
    order: int  # of registration: the higher one owns a contested address
    record: Record[P]
    sequence: int = -1
    standing: Standing = Standing.UNKNOWN
    deadline_s: float = 0.0  # of the lease while listed, of the memory after

    def on(self, event: Event) -> Move[P]:
        """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
        before, after = self.standing, TRANSITIONS.get((self.standing, event))
        if after is None:
            name = f"instance {self.record.instance_id:016x} at {self.record.address}"
            raise InvalidTransition(f"{name} is {before.value}: {event.value!r} is not possible")
        self.standing = after
        return Move(self.record, before, after)


class Membership(Generic[P]):
    """Every instance heard of lately. `apply` events; call it with `Tick` at `next_deadline_s`."""

    def __init__(self, *, lease_s: float, memory_s: float = 600.0) -> None:
        self._lease_s = lease_s
        self._memory_s = memory_s
        self._members: dict[int, _Member[P]] = {}
        self._owners: dict[str, int] = {}  # address -> the instance that was last registered there
        self._num_registered = 0

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is next due; None: not before another heartbeat."""
        return min((member.deadline_s for member in self._members.values()), default=None)

    def snapshot(self) -> tuple[Record[P], ...]:
        """Return every instance that is listed, in order of registration."""
        listed = [member for member in self._members.values() if member.standing in LISTED]
        return tuple(member.record for member in sorted(listed, key=lambda member: member.order))

    def apply(self, event: Heartbeat[P] | Tick, now_s: float) -> Delta[P]:
        """Take in an event. Raises `InvalidTransition`, changing nothing, when an instance goes back."""
        match event:
            case Heartbeat():
                return self._on_heartbeat(event, now_s)
            case Tick():
                return self._on_tick(now_s)

    def _on_heartbeat(self, heartbeat: Heartbeat[P], now_s: float) -> Delta[P]:
        record = heartbeat.record
        member = self._members.get(record.instance_id) or self._new_member(record)
        if heartbeat.sequence <= member.sequence:
            return Delta(evicted=member.standing is Standing.EVICTED)
        before = member.record
        if record.address != before.address:
            raise InvalidTransition(f"instance {record.instance_id:016x} must keep its address {before.address}")
        moves = [member.on(_SAYS[record.state])]
        member.sequence, member.record = heartbeat.sequence, record
        self._members[record.instance_id] = member
        if member.standing in LISTED:
            moves += self._settle_address(member, now_s)
        self._renew(member, now_s)
        is_news = member.standing in LISTED and (moves[0].before not in LISTED or record != before)
        evicted = member.standing is Standing.EVICTED
        return Delta((record,) if is_news else (), _no_longer_listed(moves), evicted, _real(moves))

    def _new_member(self, record: Record[P]) -> _Member[P]:
        self._num_registered += 1
        return _Member(order=self._num_registered, record=record)

    def _settle_address(self, member: _Member[P], now_s: float) -> list[Move[P]]:
        """Evict the older of `member` and the present owner of its address, if they are two."""
        address = member.record.address
        owner = self._members.get(self._owners.get(address, 0), member)
        newer, older = (member, owner) if owner.order <= member.order else (owner, member)
        self._owners[address] = newer.record.instance_id
        if newer is older:
            return []
        move = older.on(Event.REPLACED)
        self._renew(older, now_s)
        return [move]

    def _renew(self, member: _Member[P], now_s: float) -> None:
        member.deadline_s = now_s + (self._lease_s if member.standing in LISTED else self._memory_s)

    def _on_tick(self, now_s: float) -> Delta[P]:
        moves = []
        for member in [member for member in self._members.values() if member.deadline_s <= now_s]:
            if member.standing in LISTED:
                moves.append(member.on(Event.LEASE_ENDED))
                self._renew(member, now_s)
            else:
                self._forget(member)
        return Delta(removed=_no_longer_listed(moves), moves=_real(moves))

    def _forget(self, member: _Member[P]) -> None:
        del self._members[member.record.instance_id]
        if self._owners.get(member.record.address) == member.record.instance_id:
            del self._owners[member.record.address]


def _no_longer_listed(moves: Iterable[Move[P]]) -> tuple[int, ...]:
    return tuple(move.record.instance_id for move in moves if move.before in LISTED and move.after not in LISTED)


def _real(moves: Iterable[Move[P]]) -> tuple[Move[P], ...]:
    return tuple(move for move in moves if move.before is not move.after)
