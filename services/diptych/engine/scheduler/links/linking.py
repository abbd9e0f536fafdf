"""Which peers a scheduler is linked to: follows the membership, tests each link, and tries again what failed.

Membership is level-triggered: `set_peers` gives the whole set, and every link is brought towards it, so neither a
lost update nor a broken link strands a peer that is still a member.

    DOWN --connected--> CONNECTING --linked--> TESTING --passed--> UP
     | ^                     |                    |                |
     | +------- closed ------+--------------------+----------------+
     +--refused--> REFUSED

A link that we close (its peer is no member any more, it failed its test, it is to be tested anew) stays where it is
until the transport says that it is down. Nothing but `_Link.on` assigns a state.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import InvalidTransition
from diptych.engine.scheduler.links.tester import LinkTester, Verdict
from diptych.engine.values.events import Event, PeerDown, PeerUp
from diptych.kvtransfer.errors import PeerUnreachable, TransferError
from diptych.kvtransfer.probe.actions import Failed, Passed, PathResult
from diptych.kvtransfer.probe.notes import Directions
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, TransportEvent, TransportLinks
from diptych.v1 import bootstrap_pb2, worker_pb2

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.5  # between attempts to reach a member whose link is down
RETEST_S: Final = 5.0  # after a failed test


class LinkState(enum.Enum):
    """Where the link to a peer is. The values are those of the protocol."""

    DOWN = "LINK_STATE_DOWN"  # failed; will be tried again
    CONNECTING = "LINK_STATE_CONNECTING"
    TESTING = "LINK_STATE_TESTING"
    UP = "LINK_STATE_UP"
    REFUSED = "LINK_STATE_REFUSED"  # can't ever work


class Signal(enum.Enum):
    """What moves a link along."""

    CONNECTED = "connected"  # the transport has begun to link
    REFUSED = "refused"  # what the peer says of itself can't ever fit ours
    LINKED = "linked"  # both directions work
    PASSED = "passed"  # so did its test
    CLOSED = "closed"  # by either end, or by the network: the transport has ended all of its operations


TRANSITIONS: Final[Mapping[tuple[LinkState, Signal], LinkState]] = {
    (LinkState.DOWN, Signal.CONNECTED): LinkState.CONNECTING,
    (LinkState.DOWN, Signal.REFUSED): LinkState.REFUSED,
    (LinkState.CONNECTING, Signal.LINKED): LinkState.TESTING,
    (LinkState.CONNECTING, Signal.CLOSED): LinkState.DOWN,
    (LinkState.TESTING, Signal.PASSED): LinkState.UP,
    (LinkState.TESTING, Signal.CLOSED): LinkState.DOWN,
    (LinkState.UP, Signal.CLOSED): LinkState.DOWN,
}

_IS_OPEN: Final = frozenset({LinkState.CONNECTING, LinkState.TESTING, LinkState.UP})


def next_state(state: LinkState, signal: Signal) -> LinkState:
    """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
    try:
        return TRANSITIONS[state, signal]
    except KeyError:
        raise InvalidTransition(f"a link: {signal.value!r} in state {state.name}") from None


@dataclass(slots=True)
class _Link:
    """The link to a member, or to a former one until it is down."""

    state: LinkState = LinkState.DOWN
    reason: str = ""  # why it is not up
    retry_s: float = 0.0  # DOWN: when to try again
    is_renewed: bool = False  # closed by us, to be opened again at once
    verdict: Verdict | None = None  # of its last test

    def on(self, signal: Signal) -> None:
        self.state = next_state(self.state, signal)


class Linking:
    """Opens and closes the links of a transport."""

    def __init__(self, transport: TransportLinks, tester: LinkTester) -> None:
        self._transport = transport
        self._tester = tester
        self._members: Mapping[int, bytes] = {}  # instance id -> transfer metadata
        self._links: dict[int, _Link] = {}
        self._events: list[Event] = []
        self._now_s = 0.0
        self.up: set[int] = set()  # peers that may be used
        self.announced = bootstrap_pb2.WorkerLoad()  # what routers hear of them; another where `problem` is
        self.num_failures = 0  # links that broke or failed their test, since start

    @property
    def problem(self) -> str:
        """Why peers are not linked: each that is not, and says why."""
        problems = [f"{peer:016x}: {link.reason}" for peer, link in self._links.items() if link.reason]
        return "; ".join(problems) if problems else ""

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        """Bring the links to `members`: connect new ones, close those that are no member any more.

        Metadata that is missing, as of a replica that does not know our role yet, is as before.
        """
        for peer in self._links.keys() - members.keys():
            if self._links[peer].state in _IS_OPEN:
                self._transport.disconnect(peer)  # it is forgotten when it is down
            else:
                del self._links[peer]
                self._announce()
        self._members = {peer: metadata or self._members.get(peer, b"") for peer, metadata in members.items()}
        for peer in members.keys() - self._links.keys():
            self._links[peer] = _Link(retry_s=now_s)
        self.reconnect(now_s)

    def serve(self, directions: Directions) -> None:
        """Pages may go in other directions at this end. A link is opened anew where that is more than was told.

        A role changes when nothing runs here, so there is nothing that a closed link could break.
        """
        self._tester.serve(directions)
        for peer, link in self._links.items():
            if link.state is LinkState.DOWN:
                link.retry_s = self._now_s  # it may have failed for want of the new role
            elif link.state in (LinkState.TESTING, LinkState.UP) and not self._tester.covers(peer):
                link.is_renewed = True
                self._transport.disconnect(peer)
        self._announce()

    def reconnect(self, now_s: float) -> None:
        """Link to members that have no link, again some time after each failure."""
        self._now_s = now_s
        if not self._links:
            return
        for peer, link in self._links.items():
            if link.state is LinkState.DOWN and link.retry_s <= now_s:
                self._connect(peer, link)

    def expire(self) -> None:
        """End tests that take too long. Call after `on_event`: an answer may have come while a long step ran here."""
        if self._links:
            self._apply(self._tester.expire())

    def next_retry_s(self) -> float | None:
        """When `reconnect` or `expire` has something to do; None when every member is linked or never can be."""
        times = [link.retry_s for link in self._links.values() if link.state is LinkState.DOWN]
        return min((at_s for at_s in (*times, self._tester.next_deadline_s()) if at_s is not None), default=None)

    def on_event(self, event: TransportEvent) -> bool:
        """Return whether the event was about links or their tests; nobody else need look at it then."""
        match event:
            case LinkUp(peer):
                self._links[peer].on(Signal.LINKED)
                self._apply(self._tester.begin(peer))
            case LinkDown(peer, reason):
                self._on_down(peer, reason)
            case NoteReceived(peer, data) if peer not in self.up:
                self._apply(self._tester.receive(peer, data))
            case OpDone():
                verdicts = self._tester.done(event)
                self._apply(verdicts or ())
                return verdicts is not None
            case _:
                return False
        return True

    def pop_events(self) -> list[Event]:
        """Return what the scheduler must hear."""
        events, self._events = self._events, []
        return events

    def status(self) -> list[worker_pb2.LinkStatus]:
        """Describe every link, for operators."""
        return [self._describe(peer, link) for peer, link in sorted(self._links.items())]

    def _connect(self, peer: int, link: _Link) -> None:
        try:
            self._transport.connect(peer, self._members[peer])
        except TransferError as error:
            logger.error("can't ever link to %016x: %s", peer, error)
            link.on(Signal.REFUSED)
            link.reason = str(error)  # its metadata doesn't fit ours, and stays so
            self._announce()
        else:
            link.on(Signal.CONNECTED)

    def _apply(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            for result in verdict.results:
                if result.error:
                    logger.error("link to %016x: path %s is not used: %s", verdict.peer, result.path, result.error)
            link = self._links[verdict.peer]
            link.verdict = verdict
            if isinstance(verdict, Passed):
                self._set_up(verdict, link)
            else:
                logger.error("link to %016x is not used: %s", verdict.peer, verdict.reason)
                self._transport.disconnect(verdict.peer)

    def _set_up(self, passed: Passed, link: _Link) -> None:
        words = f"{passed.bytes_per_s / 1e9:.2f} GB/s" if passed.bytes_per_s else "not measured"
        logger.info("linked to %016x: pages by %s, %s", passed.peer, passed.path, words)
        link.on(Signal.PASSED)
        link.reason = ""
        self.up.add(passed.peer)
        self._announce()
        in_parts = self._transport.lands_in_parts(passed.peer)
        self._events.append(PeerUp(passed.peer, in_parts, passed.bytes_per_s))

    def _on_down(self, peer: int, reason: str) -> None:
        link = self._links.pop(peer)
        link.on(Signal.CLOSED)
        failed = link.verdict if isinstance(link.verdict, Failed) else None
        if failed is None:
            logger.warning("link to %016x is down: %s", peer, reason)
        self.up.discard(peer)
        self._announce()
        if peer in self._members and link.is_renewed:
            self._links[peer] = _Link(retry_s=self._now_s)
        elif peer in self._members:
            self.num_failures += 1
            retry_s = self._now_s + (RETEST_S if failed else RECONNECT_S)
            self._links[peer] = _Link(reason=failed.reason if failed else reason, retry_s=retry_s, verdict=failed)
        self._events.append(PeerDown(peer, reason))
        self._apply(self._tester.end(peer))

    def _announce(self) -> None:
        """Done when links change, so that it costs a step nothing."""
        usable = sorted(peer for peer in self.up if not self._links[peer].is_renewed)
        self.announced = bootstrap_pb2.WorkerLoad(linked_instances=usable)
        for peer in usable:
            verdict = self._links[peer].verdict
            if isinstance(verdict, Passed) and verdict.results and verdict.bytes_per_s:  # we write, and measured it
                self.announced.link_speeds.add(peer_instance_id=peer, bytes_per_s=verdict.bytes_per_s)

    def _describe(self, peer: int, link: _Link) -> worker_pb2.LinkStatus:
        status = worker_pb2.LinkStatus(peer_instance_id=peer, state=link.state.value, reason=link.reason)
        if link.verdict is not None:
            status.tests.extend(map(_result_to_wire, link.verdict.results))
        with contextlib.suppress(PeerUnreachable):  # not connected yet, or not any more
            info = self._transport.describe(peer)
            status.lanes, status.library, status.path = info.lanes, info.version, info.path
            status.bytes_sent, status.last_heard_s, status.rtt_s = info.bytes_sent, info.last_heard_s, info.rtt_s or 0.0
            status.in_flight_bytes, status.queued_bytes = info.in_flight_bytes, info.queued_bytes
        if isinstance(link.verdict, Passed):
            status.path, status.bytes_per_s = link.verdict.path, link.verdict.bytes_per_s
        return status


def _result_to_wire(result: PathResult) -> worker_pb2.PathTest:
    return worker_pb2.PathTest(path=result.path, bytes_per_s=result.bytes_per_s, error=result.error)
