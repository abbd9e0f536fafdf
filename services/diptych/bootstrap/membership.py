"""Decides who is alive: heartbeats and the passing of time in, changes for the watchers out. No sockets, no clock.

Rules: an instance lives as long as its lease, which every heartbeat renews. Only a heartbeat with a higher sequence
number counts. Of two instances that name the same address, the one that was started first is evicted, and stays so
however late its heartbeats come, and in whatever order: every replica decides the same. Clocks may be wrong: an
instance that was not heard for a lease, or said goodbye, has no claim. Only a caller on the host that an address names
can take the address of a living instance that speaks from another host. An instance that left is remembered for
`memory_s`, so that a delayed message cannot revive it, but never at the cost of a place for a living instance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from diptych.bootstrap.caller import Claim
from diptych.bootstrap.standing import ENDED, LISTED, SAYS, TRANSITIONS, Event, Standing
from diptych.common.errors import Forbidden, InvalidTransition, Overloaded
from diptych.common.members.alarms import Alarms
from diptych.common.members.record import Record

P = TypeVar("P")

NO_CLAIM: Final = Claim()


@dataclass(frozen=True, slots=True)
class Heartbeat(Generic[P]):
    """An instance has spoken."""

    record: Record[P]
    claim: Claim = NO_CLAIM


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Nobody could be heard for a while, for we did not run: silence until now proves nothing."""


@dataclass(frozen=True, slots=True)
class Move(Generic[P]):
    """An instance's standing changed."""

    record: Record[P]
    before: Standing
    after: Standing


@dataclass(frozen=True, slots=True)
class Delta(Generic[P]):
    """What follows from an event."""

    upserts: tuple[Record[P], ...] = ()  # records that watchers must be told
    loads: tuple[Record[P], ...] = ()  # the same, but nothing except their load changed
    removed: tuple[int, ...] = ()  # instances that watchers must forget
    ended: tuple[int, ...] = ()  # those of `removed` that never come back
    evicted: bool = False  # tells the sender of the heartbeat that a newer instance has its address
    moves: tuple[Move[P], ...] = ()  # changes of standing, to be logged

    @property
    def is_news(self) -> bool:
        """Whether watchers must hear of it at once."""
        return bool(self.upserts or self.removed or self.ended)


@dataclass(slots=True)
class _Member(Generic[P]):
    """One instance, as it stands."""

    order: int  # the order of registration
    record: Record[P]
    standing: Standing = Standing.UNKNOWN
    heard_s: float = -math.inf  # when its newest heartbeat came
    claim: Claim = NO_CLAIM

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The higher one owns a contested address."""
        return self.claim.is_own, self.record.started_ns, self.order

    def on(self, event: Event) -> Move[P]:
        """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
        before, after = self.standing, TRANSITIONS.get((self.standing, event))
        if after is None:
            name = f"instance {self.record.instance_id:016x} at {self.record.address}"
            raise InvalidTransition(f"{name} is {before.value}: {event.value!r} is not possible")
        self.standing = after
        return Move(self.record, before, after)


class Membership(Generic[P]):
    """Every instance heard of lately. `apply` events; call it with `Tick` at `next_deadline_s`.

    A deadline that comes up later is at least a lease away.
    """

    def __init__(self, *, lease_s: float, memory_s: float = 600.0, max_instances: int = 8_000) -> None:
        self._lease_s = lease_s
        self._memory_s = memory_s
        self._max_instances = max_instances
        self._members: dict[int, _Member[P]] = {}
        self._left: dict[int, None] = {}  # those that are remembered only, in the order in which they left
        self._deadlines = Alarms()  # end of the lease of each that is listed, end of the memory of the others
        self._owners: dict[str, int] = {}  # address -> the instance that was last registered there
        self._num_registered = 0

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is next due; None: not before another heartbeat."""
        return self._deadlines.next_s

    def snapshot(self) -> tuple[Record[P], ...]:
        """Return every instance that is listed, in order of registration."""
        listed = [member for member in self._members.values() if member.standing in LISTED]
        return tuple(member.record for member in sorted(listed, key=lambda member: member.order))

    def apply(self, event: Heartbeat[P] | Tick | Paused, now_s: float) -> Delta[P]:
        """Take in an event. Raises, changing nothing, `InvalidTransition` when an instance goes back, `Overloaded` when
        there is no place for another one, and `Forbidden` when its address belongs to another one that lives.
        """
        match event:
            case Heartbeat():
                return self._on_heartbeat(event, now_s)
            case Tick():
                return self._on_tick(now_s)
            case Paused():
                return self._on_excuse(now_s)

    def _on_heartbeat(self, heartbeat: Heartbeat[P], now_s: float) -> Delta[P]:
        record = heartbeat.record
        self._check_claim(heartbeat, now_s)
        member = self._members.get(record.instance_id) or self._new_member(record)
        before = member.record
        if member.standing is not Standing.UNKNOWN and record.sequence <= before.sequence:
            return Delta(evicted=member.standing is Standing.EVICTED)
        if record.address != before.address:
            raise InvalidTransition(f"instance {record.instance_id:016x} must keep its address {before.address}")
        moves = [member.on(SAYS[record.state])]
        self._members[record.instance_id] = member
        member.record, member.claim = record, heartbeat.claim
        if member.standing in LISTED:
            moves += self._settle_address(member, now_s)
        member.heard_s = now_s
        self._renew(member, now_s)
        return self._delta(member, before, moves)

    def _delta(self, member: _Member[P], before: Record[P], moves: list[Move[P]]) -> Delta[P]:
        is_listed, record = member.standing in LISTED, member.record
        is_news = is_listed and (moves[0].before not in LISTED or record != before)
        return Delta(
            upserts=(record,) if is_news else (),
            loads=(record,) if is_listed and not is_news and record.load != before.load else (),
            removed=_no_longer_listed(moves),
            ended=_ended(moves),
            evicted=member.standing is Standing.EVICTED,
            moves=_real(moves),
        )

    def _new_member(self, record: Record[P]) -> _Member[P]:
        if len(self._members) >= self._max_instances:
            if not self._left:
                raise Overloaded(f"{self._max_instances} instances are listed: no more fit (--max-instances)")
            self._forget(self._members[next(iter(self._left))])
        self._num_registered += 1
        return _Member(order=self._num_registered, record=record)

    def _settle_address(self, member: _Member[P], now_s: float) -> list[Move[P]]:
        """Evict one of `member` and the present owner of its address, if they are two."""
        address = member.record.address
        owner = self._members.get(self._owners.get(address, 0), member)
        owner_holds = self._is_alive(owner, now_s) and owner.rank > member.rank
        holder, loser = (owner, member) if owner_holds else (member, owner)
        self._owners[address] = holder.record.instance_id
        if holder is loser:
            return []
        move = loser.on(Event.REPLACED)
        self._renew(loser, now_s)
        return [move]

    def _check_claim(self, heartbeat: Heartbeat[P], now_s: float) -> None:
        record = heartbeat.record
        known, owner = self._members.get(record.instance_id), self._members.get(self._owners.get(record.address, 0))
        if owner is None or owner is known or not self._is_alive(owner, now_s):
            return
        if (known is None or known.standing not in ENDED) and not heartbeat.claim.may_displace(owner.claim):
            name = f"instance {owner.record.instance_id:016x}, which lives and speaks from {owner.claim.host}"
            raise Forbidden(
                f"address {record.address} belongs to {name}: from {heartbeat.claim.host} it can be taken when that "
                "has been silent for a lease; a member at an address of its own host has it at once (--advertise-host)"
            )

    def _is_alive(self, member: _Member[P], now_s: float) -> bool:
        return member.standing in LISTED and now_s - member.heard_s < self._lease_s

    def listed(self, instance_id: int) -> Record[P] | None:
        """Return the record of an instance, if it is listed."""
        member = self._members.get(instance_id)
        return member.record if member and member.standing in LISTED else None

    def _renew(self, member: _Member[P], now_s: float) -> None:
        instance_id, is_listed = member.record.instance_id, member.standing in LISTED
        self._deadlines.set(instance_id, now_s + (self._lease_s if is_listed else self._memory_s))
        if is_listed:
            self._left.pop(instance_id, None)
        else:
            self._left.setdefault(instance_id)

    def _on_tick(self, now_s: float) -> Delta[P]:
        moves = []
        for instance_id in self._deadlines.pop_due(now_s):
            member = self._members[instance_id]
            if member.standing in LISTED:
                moves.append(member.on(Event.LEASE_ENDED))
                self._renew(member, now_s)
            else:
                self._forget(member)
        return Delta(removed=_no_longer_listed(moves), moves=_real(moves))

    def _on_excuse(self, now_s: float) -> Delta[P]:
        for member in self._members.values():
            if member.standing in LISTED:
                member.heard_s = now_s
                self._renew(member, now_s)
        return Delta()

    def _forget(self, member: _Member[P]) -> None:
        instance_id = member.record.instance_id
        del self._members[instance_id], self._left[instance_id]
        self._deadlines.drop(instance_id)
        if self._owners.get(member.record.address) == instance_id:
            del self._owners[member.record.address]


def _no_longer_listed(moves: Iterable[Move[P]]) -> tuple[int, ...]:
    return tuple(move.record.instance_id for move in moves if move.before in LISTED and move.after not in LISTED)


def _ended(moves: Iterable[Move[P]]) -> tuple[int, ...]:
    return tuple(move.record.instance_id for move in moves if move.before is not move.after and move.after in ENDED)


def _real(moves: Iterable[Move[P]]) -> tuple[Move[P], ...]:
    return tuple(move for move in moves if move.before is not move.after)
