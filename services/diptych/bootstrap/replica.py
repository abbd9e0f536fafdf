"""Decides as one bootstrap replica, without sockets and clock: heartbeats in, news for each watcher out. Pure.

A change is serialised once and put into every watcher's `Outbox`. It is sent at once, unless only a load changed: such
changes go to one part of the watchers after the other, because all at once would keep everything else waiting. Watchers
that see the same link keys get the same bytes.

`Mismatches` finds workers of a model that can never pair, and reports them once for each two kinds.

`View` decides whose link keys a watcher is told: those of workers that may be peers of the watcher's instances. Rule: a
watcher that is every party is told all keys. Other watchers show the secrets of their instances, and are told what
these need in the roles in which they are registered. Until one of them is registered, they are told nothing, so that a
key that is not known yet is not mistaken for one that will not be told.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych.bootstrap.announcement import Announcement, instance_of, load_chunk, read_heartbeat, upsert_chunk
from diptych.bootstrap.caller import ANYBODY, WATCHERS_EACH, Caller, Limits
from diptych.bootstrap.membership import Delta, Heartbeat, Membership, Move, Paused, Tick
from diptych.bootstrap.outbox import Outbox
from diptych.bootstrap.standing import Standing
from diptych.common.errors import Forbidden, InvalidRequest, InvalidTransition, Overloaded
from diptych.common.members.instances import name_of
from diptych.common.members.record import Record
from diptych.common.members.roles import WORKER_ROLES, Part, Role, part_of
from diptych.common.members.terms import Terms, mismatch, terms_of
from diptych.common.verdicts.permissions import EVERY
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

NUM_TURNS: Final = 10
MAX_TOLD: Final = 3  # at a time


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    heartbeats: int = 0  # taken
    refused: int = 0  # heartbeats that could not be, or for which there was no place
    mismatches: int = 0  # that were told in the log
    moves: Counter[Standing] = field(default_factory=Counter)  # instances that came to stand so


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica at one moment."""

    counts: Counts  # live
    listed: Sequence[Record[Announcement]]
    num_watchers: int


class Replica:
    """Who is alive, and who wants to know it. Call `tick` at `next_deadline_s`."""

    def __init__(self, *, lease_s: float, limits: Limits) -> None:
        self._limits = limits
        self._lease_ms = round(lease_s * 1000)
        self._membership: Membership[Announcement] = Membership(lease_s=lease_s, max_instances=limits.max_instances)
        self._watchers: dict[Outbox, int | None] = {}  # whose turn to hear of loads is when; None: never
        self._views: dict[Outbox, View] = {}
        self._watching: dict[int, set[Outbox]] = {}  # by instance that watches
        self._turns = itertools.cycle(range(NUM_TURNS))
        self._places = itertools.cycle(range(NUM_TURNS))
        self._new_loads: dict[int, Record[Announcement]] = {}  # since the last turn
        self._loads: deque[dict[int, bytes]] = deque(maxlen=NUM_TURNS)  # one entry for each turn, as WatchUpdates
        self._mismatches = Mismatches()
        self._counts = Counts()

    @property
    def next_deadline_s(self) -> float | None:
        """When a `tick` is next due; what comes up later is due a lease after it came up."""
        return self._membership.next_deadline_s

    def receive(self, data: bytes, now_s: float, caller: Caller = ANYBODY) -> Delta[Announcement]:
        """Apply a heartbeat as it came. Raises `InvalidRequest`, `Forbidden` and `Overloaded`, changing nothing."""
        try:
            record = read_heartbeat(data, caller)
            delta = self._membership.apply(Heartbeat(record, caller.claim(record.address)), now_s)
        except (InvalidRequest, Forbidden, Overloaded):
            self._counts.refused += 1
            raise
        except InvalidTransition as error:
            self._counts.refused += 1
            raise InvalidRequest(str(error)) from None
        self._counts.heartbeats += 1
        return self._announce(delta)

    def tick(self, now_s: float) -> Delta[Announcement]:
        return self._announce(self._membership.apply(Tick(), now_s))

    def excuse(self, now_s: float) -> None:
        """Give everybody that is listed a fresh lease: nobody could be heard."""
        self._membership.apply(Paused(), now_s)

    def announce_loads(self) -> list[Outbox]:
        """Tell those whose turn it is how busy everybody is whose load changed since their last one; return them."""
        self._loads.append({instance_id: load_chunk(record) for instance_id, record in self._new_loads.items()})
        self._new_loads.clear()
        turn = next(self._turns)
        told = [outbox for outbox, place in self._watchers.items() if place == turn]
        for outbox, loads in itertools.product(told, self._loads):
            outbox.add_loads(loads)
        return told

    def open(self, *, with_loads: bool, caller: Caller = ANYBODY) -> Outbox:
        """Return the outbox of another watcher. Raises `Overloaded`."""
        if len(self._watchers) >= self._limits.max_watchers:
            raise Overloaded(f"{self._limits.max_watchers} watchers are served: no more fit (--max-watchers)")
        if any(len(self._watching.get(each, ())) >= WATCHERS_EACH for each in caller.proven):
            raise Overloaded(f"{WATCHERS_EACH} watchers of this instance are served: end some")
        outbox = Outbox(self._lease_ms)
        self._watchers[outbox] = next(self._places) if with_loads else None
        view = self._views[outbox] = View(caller)
        for instance_id in view.instances:
            self._watching.setdefault(instance_id, set()).add(outbox)
            if record := self._membership.listed(instance_id):
                view.learn(instance_id, record.payload.role)
        return outbox

    def close(self, outbox: Outbox) -> None:
        del self._watchers[outbox]
        for instance_id in self._views.pop(outbox).instances:
            self._watching[instance_id].discard(outbox)
            if not self._watching[instance_id]:
                del self._watching[instance_id]

    def may_pop(self, outbox: Outbox) -> bool:
        """Whether it is known what its watcher may see: who is to be a worker registers first."""
        return self._views[outbox].is_known

    def pop(self, outbox: Outbox) -> bytes:
        """Return what a watcher has to be told, as a WatchUpdate."""
        return outbox.pop(lambda: self._everything(outbox).values())

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self._counts, self._membership.snapshot(), len(self._watchers))

    def _everything(self, outbox: Outbox) -> dict[int, bytes]:
        records: Iterable[Record[Announcement]] = self._membership.snapshot()
        if self._watchers[outbox] is None:
            records = (dataclasses.replace(record, load=b"") for record in records)
        return _chunks(records, self._views[outbox].roles)

    def _announce(self, delta: Delta[Announcement]) -> Delta[Announcement]:
        self._new_loads.update((record.instance_id, record) for record in delta.loads)
        if delta.is_news:
            for roles, outboxes in self._by_roles().items():
                chunks = _chunks(delta.upserts, roles)
                for outbox in outboxes:
                    outbox.add(chunks, delta.removed, delta.ended)
            self._learn(delta)
            self._note(delta)
        return delta

    def _by_roles(self) -> dict[frozenset[Role] | None, list[Outbox]]:
        """Return the watchers by whose link keys they see."""
        found: dict[frozenset[Role] | None, list[Outbox]] = {}
        for outbox, view in self._views.items():
            found.setdefault(view.roles, []).append(outbox)
        return found

    def _learn(self, delta: Delta[Announcement]) -> None:
        """Show watchers that have another role now what they see in it."""
        for record in delta.upserts:
            for outbox in self._watching.get(record.instance_id, ()):
                sees_more = self._views[outbox].learn(record.instance_id, record.payload.role)
                if sees_more and not outbox.owes_snapshot:
                    outbox.add(self._everything(outbox), (), ())

    def _note(self, delta: Delta[Announcement]) -> None:
        for move in delta.moves:
            self._counts.moves[move.after] += 1
            _log_move(move)
        for record in delta.upserts:
            for words in self._mismatches.add(instance_of(record)):
                self._counts.mismatches += 1
                logger.warning("%s", words)
        for instance_id in (*delta.removed, *delta.ended):
            self._mismatches.drop(instance_id)
            self._new_loads.pop(instance_id, None)


def _chunks(records: Iterable[Record[Announcement]], roles: frozenset[Role] | None) -> dict[int, bytes]:
    numbers = None if roles is None else frozenset(role.wire for role in roles)
    return {record.instance_id: upsert_chunk(record, roles=numbers) for record in records}


def _log_move(move: Move[Announcement]) -> None:
    level = logging.WARNING if move.after in (Standing.EXPIRED, Standing.EVICTED) else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s is %s", name_of(instance_of(move.record)), move.after.value)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Workers that are the same to all others."""

    part: Part
    terms: Terms


class Mismatches:
    """Follows the workers that are listed."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}  # by instance id
        self._counts: Counter[_Kind] = Counter()
        self._examples: dict[_Kind, str] = {}

    def add(self, instance: Instance) -> tuple[str, ...]:
        """Take in a record; return what no pair can be made of that could not be known before, in words."""
        part = part_of(instance)
        if part is None:
            return ()
        kind = _Kind(part, terms_of(instance.terms))
        if self._kinds.get(instance.instance_id) == kind:
            return ()
        self.drop(instance.instance_id)
        self._kinds[instance.instance_id] = kind
        self._counts[kind] += 1
        if self._counts[kind] > 1:
            return ()
        self._examples[kind] = f"{instance.instance_id:016x} at {instance.address}"
        return tuple(itertools.islice(self._apart(kind), MAX_TOLD))

    def drop(self, instance_id: int) -> None:
        """Forget an instance, if it is known."""
        kind = self._kinds.pop(instance_id, None)
        if kind is not None:
            self._counts[kind] -= 1
            if not self._counts[kind]:
                del self._counts[kind], self._examples[kind]

    def _apart(self, kind: _Kind) -> Iterator[str]:
        for other, example in self._examples.items():
            words = mismatch(kind.terms, other.terms) if kind.part.meets(other.part) else ""
            if words:
                yield f"{self._examples[kind]} and {example} can't pair: {words}"


class View:
    """What one watcher may see."""

    def __init__(self, caller: Caller) -> None:
        self.instances = caller.proven  # that the watcher is
        self._sees_all = caller.parties == EVERY
        self._roles: dict[int, Role | None] = {}  # entries of the instances that have registered
        self.roles = self._seen()

    @property
    def is_known(self) -> bool:
        """Whether it is known what the watcher may see."""
        return self._sees_all or not self.instances or bool(self._roles)

    def learn(self, instance_id: int, role: int) -> bool:
        """Take in as what an instance of the watcher is registered; return whether it sees something else now."""
        before = self.is_known, self.roles
        self._roles[instance_id] = WORKER_ROLES.get(role)
        self.roles = self._seen()
        return before != (self.is_known, self.roles)

    def _seen(self) -> frozenset[Role] | None:
        """Return the roles whose link keys are told; None: all."""
        ours = [role for role in self._roles.values() if role]
        return None if self._sees_all else frozenset(r for r in Role if any(r.links_with(each) for each in ours))
