"""The links of one scheduler to its peers, as its loop needs them: effects become transfers, and transfers events."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from diptych.common.members.roles import LegKind, Role
from diptych.engine.scheduler.links.linking import Linking
from diptych.engine.scheduler.links.page_grants import PageGrants
from diptych.engine.scheduler.links.posting import Posting
from diptych.engine.scheduler.links.tester import LinkTester, new_link_tester
from diptych.engine.values.batch import OnLayer
from diptych.engine.values.events import Event, NoteArrived, Transfer, WriterGone
from diptych.engine.values.transfer_rules import Window
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.probe.notes import Directions
from diptych.kvtransfer.transport import (
    LinkDown,
    NoteReceived,
    OpDone,
    PeerTransport,
    Refusals,
    TransportEvent,
    TransportMemory,
)
from diptych.v1 import bootstrap_pb2, worker_pb2

logger = logging.getLogger(__name__)

SUSPECT_CHECK_S: Final = 0.2  # between looks whether a lost peer can still write
_NO_PAGES: Final = PoolLayout.kv(num_pages=1, num_layers=1, page_size=1, num_kv_heads=1, head_dim=1, dtype="float32")


def directions_of(role: Role) -> Directions:
    """Return in which directions pages may go at a worker."""
    return Directions(out=role.serves(LegKind.PREFILL), into=role.serves(LegKind.DECODE))


class Links:
    """Owns the transport of a scheduler process. All calls from the scheduler's thread."""

    def __init__(
        self, transport: PeerTransport, memory: TransportMemory, tester: LinkTester, windows: Sequence[Window]
    ) -> None:
        """Pages that follow a step go by these windows of layers."""
        self._transport = transport
        self._memory = memory
        self._linking = Linking(transport, tester)
        self._page_nbytes = tester.page_nbytes
        self._events: list[Event] = []
        self._grants = PageGrants(transport, memory)
        self._posting = Posting(transport, self._grants, windows, self._events)

    @property
    def load(self) -> bootstrap_pb2.WorkerLoad:
        """What routers hear of links and transfers."""
        load = self._linking.announced
        load.queued_transfer_bytes = self._posting.num_pages_open * self._page_nbytes
        return load

    @property
    def problem(self) -> str:
        """Why no peer is linked although there are some; empty when one is."""
        return self._linking.problem

    @property
    def num_failures(self) -> int:
        """Links that broke, since start."""
        return self._linking.num_failures

    @property
    def num_pages_sent(self) -> int:
        return self._posting.num_pages_sent

    @property
    def refusals(self) -> Refusals:
        """What was sent to the transfer engine and not taken, since start."""
        return self._memory.refusals()

    @property
    def has_events(self) -> bool:
        """Whether `poll` has something to say although no descriptor is readable."""
        return bool(self._events)

    def descriptors(self) -> Sequence[int]:
        """File descriptors that are readable while `poll` has transfer events."""
        return (self._transport.fileno(),)

    def set_peers(self, members: Mapping[int, bytes], now_s: float) -> None:
        """Bring the links to `members`: connect new ones, close those that are no member any more."""
        self._linking.set_peers(members, now_s)

    def serve(self, role: Role) -> None:
        """Test links in the directions in which this role lets pages flow."""
        self._linking.serve(directions_of(role))

    def reconnect(self, now_s: float) -> None:
        """Link to members that have no link. Call before `poll`."""
        self._linking.reconnect(now_s)

    def next_retry_s(self) -> float | None:
        """When `reconnect` has something to do."""
        return self._linking.next_retry_s()

    def perform(self, effect: Transfer) -> None:
        self._posting.perform(effect)

    def layer_listener(self) -> OnLayer | None:
        """Return who is to hear of each layer of the next step."""
        return self._posting.layer_listener()

    def give_up_step(self) -> None:
        """The step that runs will not be complete."""
        self._posting.give_up_step()

    def poll(self, suspects: set[int]) -> list[Event]:
        """Return what happened since the last call, without waiting."""
        for event in self._transport.poll():
            self._take(event)
        self._linking.expire()
        self._events += self._linking.take_events()
        self._posting.post()
        if suspects:
            self._events.extend(WriterGone(peer) for peer in suspects if self._transport.writer_gone(peer))
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def status(self) -> list[worker_pb2.LinkStatus]:
        """Describe every link, for operators."""
        return self._linking.status()

    def close(self) -> None:
        self._transport.close()

    def _take(self, event: TransportEvent) -> None:
        if isinstance(event, LinkDown):
            self._posting.refuse_all(event.peer, event.reason)
            self._grants.link_down(event.peer)
        if self._linking.take(event):
            self._events += self._linking.take_events()
            return
        match event:
            case NoteReceived(peer, data, digest):
                self._take_note(peer, data, digest)
            case OpDone():
                self._posting.take(event)

    def _take_note(self, peer: int, data: bytes, digest: int | None) -> None:
        try:
            note = note_codec.decode(data, sender=peer, target=self._transport.instance_id)
        except MalformedNote as error:
            logger.error("dropped a note from %016x: %s", peer, error)
            return
        self._grants.note_arrived(peer, note)
        self._events.append(NoteArrived(peer, note, digest))


def links_of_nobody() -> Links:
    """Return the links of a scheduler without peers: over the in-process transport, alone in its network."""
    transport = InprocNetwork().transport(1)
    tester = new_link_tester(transport, transport.allocate_pool(_NO_PAGES), directions_of(Role.LOCAL), PathRule())
    return Links(transport, transport, tester, ())
