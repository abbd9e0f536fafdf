"""The links of one scheduler to its peers, as its loop needs them: effects become transfers, and transfers events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from diptych.common.members.roles import LegKind, Role
from diptych.engine.scheduler.links.linking import Linking
from diptych.engine.scheduler.links.posting import PageGrants, Posting
from diptych.engine.scheduler.links.tester import LinkTester
from diptych.engine.values.events import Event, NoteArrived, WriterGone
from diptych.engine.values.transfer_rules import Window
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
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
from diptych.v1 import bootstrap_pb2

logger = logging.getLogger(__name__)

SUSPECT_CHECK_S: Final = 0.2  # between looks whether a lost peer can still write
_NO_PAGES: Final = PoolLayout.kv(num_pages=1, num_layers=1, page_size=1, num_kv_heads=1, head_dim=1, dtype="float32")


def directions_of(role: Role, *, pulls: bool = False) -> Directions:
    """Return in which directions pages may go at a worker.

    Out of any, of prompts or of requests that move; into any where prefixes are pulled.
    """
    return Directions(out=True, into=pulls or role.serves(LegKind.DECODE))


class Links:
    """Owns the transport of a scheduler process. All calls from the scheduler's thread.

    `linking` opens and closes the links, `posting` hands over what the core wants moved, and `poll` lets both go on.
    """

    def __init__(
        self,
        transport: PeerTransport,
        memory: TransportMemory,
        tester: LinkTester,
        windows: Sequence[Window],
        *,
        pulls: bool = False,
    ) -> None:
        """Pages that follow a step go by these windows of layers. `pulls`: prefixes are pulled over all links."""
        self._transport = transport
        self._pulls = pulls
        self._memory = memory
        self.linking = Linking(transport, tester)
        self._page_nbytes = tester.page_nbytes
        self._events: list[Event] = []
        self._grants = PageGrants(transport, memory)
        self.posting = Posting(transport, self._grants, windows, self._events)

    @property
    def load(self) -> bootstrap_pb2.WorkerLoad:
        """What routers hear of links. It is never changed: where links change, there is another."""
        return self.linking.announced

    @property
    def queued_bytes(self) -> int:
        """What transfers have yet to bring to others."""
        return self.posting.num_pages_open * self._page_nbytes

    @property
    def refusals(self) -> Refusals:
        """What was sent to the transfer engine and not taken, since start."""
        return self._memory.refusals()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has transfer events."""
        return self._transport.fileno()

    @property
    def has_events(self) -> bool:
        """Whether `poll` has something to say although no descriptor is readable."""
        return bool(self._events)

    def serve(self, role: Role) -> None:
        """Test links in the directions in which this role lets pages flow."""
        self.linking.serve(directions_of(role, pulls=self._pulls))

    def poll(self, suspects: set[int]) -> list[Event]:
        """Return what happened since the last call, without waiting."""
        for event in self._transport.poll():
            self._on_event(event)
        self.linking.expire()
        self._events += self.linking.pop_events()
        if self.posting.queue:
            self.posting.post()
        if suspects:
            self._events.extend(WriterGone(peer) for peer in suspects if self._transport.writer_gone(peer))
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def close(self) -> None:
        self._transport.close()

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, LinkDown):
            self.posting.refuse_all(event.peer, event.reason)
            self._grants.link_down(event.peer)
        if self.linking.on_event(event):
            self._events += self.linking.pop_events()
            return
        match event:
            case NoteReceived(peer, data, digest):
                self._on_note(peer, data, digest)
            case OpDone():
                self.posting.on_done(event)

    def _on_note(self, peer: int, data: bytes, digest: int | None) -> None:
        try:
            note = note_codec.decode(data, sender=peer, target=self._transport.instance_id)
        except MalformedNote as error:
            logger.error("dropped a note from %016x: %s", peer, error)
            return
        self._grants.note_arrived(peer, note)
        self._events.append(NoteArrived(peer, note, digest))


def links_of_nobody() -> Links:
    """Return the links of a scheduler without peers: over the in-process transport, alone in its network."""
    from diptych.kvtransfer.inproc import InprocNetwork

    transport = InprocNetwork().transport(1)
    tester = LinkTester(transport, transport.allocate_pool(_NO_PAGES), directions_of(Role.LOCAL), PathRule())
    return Links(transport, transport, tester, ())
