"""Which members of the platform a worker exchanges KV with, and the news of them for its scheduler.

Rule: peers are loaded, match our terms, have a role that KV moves to or from ours, and bootstrap has told us how to
link to them, which it does once it knows our role. A link to a member stays when
one of the two takes other weights: what they have in common must still be brought to its end, over that link. Nothing
new is begun between them: routers don't pair them. It goes when their roles have nothing to exchange any more: a worker
changes its role when it has nothing in common with anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.members.terms import mismatch, terms_of
from diptych.engine.frontend.scheduler_client import Commands
from diptych.v1.bootstrap_pb2 import Instance, Role
from diptych.v1.engine_pb2 import PeerView, SchedulerCommands


class Membership(Protocol):
    """Who is alive."""

    def instances(self) -> Mapping[int, Instance]: ...

    def add_listener(self, listener: Callable[[], None]) -> object: ...


class Peers:
    """The peers of an instance, kept current by `follow`."""

    def __init__(self, ours: Instance, scheduler: Commands, on_change: Callable[[], None]) -> None:
        self._ours = ours  # as it is at any time
        self._scheduler = scheduler
        self._on_change = on_change  # called when who is a peer may have changed
        self._others: Mapping[int, Instance] = MappingProxyType({})
        self._told: dict[int, tuple[Role, bytes]] = {}
        self._changed = asyncio.Event()

    async def follow(self, membership: Membership) -> None:
        """Tell the scheduler the whole set of its peers, each time it changed, for ever."""
        membership.add_listener(self._changed.set)
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._others = membership.instances()
            await self._send_peers([each for each in self._others.values() if self._is_linked_to(each)])
            self._on_change()

    async def _send_peers(self, peers: Iterable[Instance]) -> None:
        news = {peer.instance_id: (peer.role, peer.transfer.engine_metadata) for peer in peers}
        if news != self._told:
            self._told = news
            await self._scheduler.send(SchedulerCommands(peers=PeerView(instances=peers)))

    def _is_linked_to(self, other: Instance) -> bool:
        was_linked = other.instance_id in self._told and self._exchanges_with(other)
        return was_linked or (self._is_peer(other) and bool(other.transfer.engine_metadata))

    def look_again(self) -> None:
        """Our own record has changed."""
        self._changed.set()

    @property
    def num_known(self) -> int:
        """How many members something new may begin with."""
        return sum(map(self._is_peer, self._others.values()))

    def num_among(self, instance_ids: Iterable[int]) -> int:
        """How many of these are members with whom something new may begin."""
        return sum(self._is_peer(self._others[each]) for each in instance_ids if each in self._others)

    def _is_peer(self, other: Instance) -> bool:
        """Whether something new may begin between us."""
        if not other.compat or other.state >= State.GONE or other.instance_id == self._ours.instance_id:
            return False
        return self._exchanges_with(other) and not mismatch(terms_of(self._ours.terms), terms_of(other.terms))

    def _exchanges_with(self, other: Instance) -> bool:
        role = WORKER_ROLES.get(other.role)
        return role is not None and WORKER_ROLES[self._ours.role].exchanges_with(role)
