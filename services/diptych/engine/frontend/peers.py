"""Which members of the platform a worker exchanges KV with, and the news of them for its scheduler.

Rule: peers are loaded, match our terms, have a role that KV moves to or from ours, and bootstrap has told us how to
link to them, which it does once it knows our role. A link to a member stays when
one of the two takes other weights: what they have in common must still be brought to its end, over that link. Nothing
new is begun between them: routers don't pair them. It goes when their roles have nothing to exchange any more: a worker
changes its role when it has nothing in common with anybody.

Workers that both compute prompts are linked, too, if both pull cached prefixes. That is no reason to be ready, and in a
large fleet only some of those pairs are: some `MAX_ALIKE` of each worker, of those with whom it could begin something.

Workers that only decode hand running requests to each other, and each of them could to any: so that their links do not
grow with the square of their number, a worker links to its `neighbours` only.

Of either kind, both ends know the same members, so both name each other. A link that has been up stays while both are
members, whoever comes beside them: in a pool that grows one by one from `k` to `n` workers there are some
`k * ln(n / k)` more. That it has been up is what both ends know of it. That one of them wanted it is not: the other one
may have known more members from the start, and never have wanted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from diptych.common.members.neighbours import neighbours
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.members.terms import Feature, mismatch, terms_of
from diptych.engine.frontend.scheduler_client import Commands
from diptych.v1.bootstrap_pb2 import Instance, Role
from diptych.v1.engine_pb2 import PeerView, SchedulerCommands

MAX_ALIKE: Final = 16  # workers, about, to which one is linked only to pull prefixes
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Membership(Protocol):
    """Who is alive."""

    def instances(self) -> Mapping[int, Instance]: ...

    def add_listener(self, listener: Callable[[], None]) -> object: ...


class Peers:
    """The peers of an instance, kept current by `follow`."""

    def __init__(
        self, ours: Instance, scheduler: Commands, on_change: Callable[[], None], num_move_links: int = 0
    ) -> None:
        """`num_move_links`: to workers that decode and nothing else, where this one does the same."""
        self._ours = ours  # as it is at any time
        self._scheduler = scheduler
        self._on_change = on_change  # called when who is a peer may have changed
        self._num_move_links = num_move_links
        self._met: set[int] = set()  # to whom a link has been up
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
            beside = self._beside() | self._alike()
            peers = [each for key, each in self._others.items() if key in beside or self._is_linked_to(each)]
            await self._send_peers(peers)
            self._on_change()

    async def _send_peers(self, peers: Iterable[Instance]) -> None:
        news = {peer.instance_id: (peer.role, peer.transfer.engine_metadata) for peer in peers}
        if news != self._told:
            self._told = news
            await self._scheduler.send(SchedulerCommands(peers=PeerView(instances=peers)))

    def _is_linked_to(self, other: Instance) -> bool:
        if not self._exchanges_with(other):
            return False
        return other.instance_id in self._told or (self._matches(other) and bool(other.transfer.engine_metadata))

    def _beside(self) -> set[int]:
        """Return whom running requests go to and come from that no prompt does."""
        may = {key for key, each in self._others.items() if self._hands_on_to(each)}
        fit = {key for key in may if self._matches(self._others[key]) and self._others[key].transfer.engine_metadata}
        return neighbours(self._ours.instance_id, fit, self._num_move_links) | self._met & may

    def _alike(self) -> set[int]:
        """Return who is linked to pull prefixes, and for nothing else."""
        may = {key for key, each in self._others.items() if self._shares_with(each)}
        fit = {key for key in may if self._matches(self._others[key])}
        few = {key for key in fit if not self._encodes(self._others[key])}
        near = {key for key in few if _place(self._ours.instance_id, key) * len(few) < MAX_ALIKE} | (fit - few)
        return {key for key in near if self._others[key].transfer.engine_metadata} | self._met & may

    def linked(self, instance_ids: Iterable[int]) -> None:
        """Links to these are up."""
        self._met.intersection_update(self._others)
        self._met.update(instance_ids)

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
        """Whether a prompt may begin between us."""
        return self._exchanges_with(other) and self._matches(other)

    def _matches(self, other: Instance) -> bool:
        """Whether something new may begin between us, as far as it is not for our roles to say."""
        if not other.compat or other.state >= State.GONE or other.instance_id == self._ours.instance_id:
            return False
        return not mismatch(terms_of(self._ours.terms), terms_of(other.terms))

    def _exchanges_with(self, other: Instance) -> bool:
        role = WORKER_ROLES.get(other.role)
        return role is not None and WORKER_ROLES[self._ours.role].exchanges_with(role)

    def _hands_on_to(self, other: Instance) -> bool:
        role = WORKER_ROLES.get(other.role)
        return role is not None and WORKER_ROLES[self._ours.role].hands_on_to(role) and not self._exchanges_with(other)

    def _shares_with(self, other: Instance) -> bool:
        """Whether prefixes are all that goes between us."""
        role = WORKER_ROLES.get(other.role)
        if role is None or not WORKER_ROLES[self._ours.role].shares_with(role) or self._exchanges_with(other):
            return False
        return all(terms_of(each.terms).has(Feature.PULL) for each in (self._ours, other))

    def _encodes(self, other: Instance) -> bool:
        """Whether one of us encodes images for the other: there are few who do, and all are asked."""
        ours, theirs = WORKER_ROLES[self._ours.role], WORKER_ROLES[other.role]
        return ours.encodes_for(theirs) or theirs.encodes_for(ours)


def _place(one: int, other: int) -> float:
    """Return where a pair stands by chance, from 0 to 1: the same from both ends."""
    return ((one ^ other) * _MIX & _MASK) / 2**64
