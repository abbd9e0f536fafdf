"""Which peers a scheduler is linked to: follows the membership, and tries again what failed.

Membership is level-triggered: `set_peers` gives the whole set, and every link is brought towards it, so neither a
lost update nor a broken link strands a peer that is still a member.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.engine.events import Event, PeerDown, PeerUp
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.transport import LinkDown, LinkUp, Transport
from diptych.v1 import worker_pb2

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.5  # between attempts to reach a member whose link is down


class LinkState(enum.Enum):
    """Where the link to a peer is. The values are those of the protocol."""

    DOWN = "LINK_STATE_DOWN"  # failed; will be tried again
    CONNECTING = "LINK_STATE_CONNECTING"
    UP = "LINK_STATE_UP"
    REFUSED = "LINK_STATE_REFUSED"  # can't ever work


_IS_OPEN: Final = frozenset({LinkState.CONNECTING, LinkState.UP})


@dataclass(slots=True)
class _Link:
    """The link to a member, or to a former one until it is down."""

    state: LinkState = LinkState.DOWN
    reason: str = ""  # why it is not up
    retry_s: float = 0.0  # DOWN: when to try again


class Linking:
    """Opens and closes the links of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._members: Mapping[int, bytes] = {}  # instance id -> transfer metadata
        self._links: dict[int, _Link] = {}
        self._now_s = 0.0
        self.up: set[int] = set()  # peers that may be used
        self.num_failures = 0  # links that broke, since start

    @property
    def problem(self) -> str:
        """Why no peer is linked although there are some; empty when one is."""
        if self.up:
            return ""
        return "; ".join(f"{peer:016x}: {link.reason}" for peer, link in self._links.items() if link.reason)

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        """Bring the links to `members`: connect new ones, close those that are no member any more."""
        for peer in self._links.keys() - members.keys():
            if self._links[peer].state in _IS_OPEN:
                self._transport.disconnect(peer)  # it is forgotten when it is down
            else:
                del self._links[peer]
        self._members = members
        for peer in members.keys() - self._links.keys():
            self._links[peer] = _Link(retry_s=now_s)
        self.reconnect(now_s)

    def reconnect(self, now_s: float) -> None:
        """Link to members that have no link, again `RECONNECT_S` after each failure."""
        self._now_s = now_s
        for peer, link in self._links.items():
            if link.state is LinkState.DOWN and link.retry_s <= now_s:
                self._connect(peer, link)

    def next_retry_s(self) -> float | None:
        """When `reconnect` has something to do; None when every member is linked or never can be."""
        return min((link.retry_s for link in self._links.values() if link.state is LinkState.DOWN), default=None)

    def take(self, event: LinkUp | LinkDown) -> list[Event]:
        """Return what the scheduler hears of it."""
        return self._take_up(event.peer) if isinstance(event, LinkUp) else self._take_down(event.peer, event.reason)

    def status(self) -> list[worker_pb2.LinkStatus]:
        """Describe every link, for operators."""
        return [self._describe(peer, link) for peer, link in sorted(self._links.items())]

    def _connect(self, peer: int, link: _Link) -> None:
        try:
            self._transport.connect(peer, self._members[peer])
        except TransferError as error:
            logger.error("can't ever link to %016x: %s", peer, error)
            link.state, link.reason = LinkState.REFUSED, str(error)  # its metadata doesn't fit ours, and stays so
        else:
            link.state = LinkState.CONNECTING

    def _take_up(self, peer: int) -> list[Event]:
        logger.info("linked to %016x: %s", peer, self._transport.describe(peer))
        self._links[peer].state, self._links[peer].reason = LinkState.UP, ""
        self.up.add(peer)
        return [PeerUp(peer)]

    def _take_down(self, peer: int, reason: str) -> list[Event]:
        logger.warning("link to %016x is down: %s", peer, reason)
        self.up.discard(peer)
        del self._links[peer]
        if peer in self._members:
            self.num_failures += 1
            self._links[peer] = _Link(reason=reason, retry_s=self._now_s + RECONNECT_S)
        return [PeerDown(peer, reason)]

    def _describe(self, peer: int, link: _Link) -> worker_pb2.LinkStatus:
        status = worker_pb2.LinkStatus(peer_instance_id=peer, state=link.state.value, reason=link.reason)
        if link.state in _IS_OPEN:
            info = self._transport.describe(peer)
            status.lanes, status.library = info.lanes, info.version
            status.bytes_sent, status.last_heard_s = info.bytes_sent, info.last_heard_s
        return status
