"""Performs the actions of in-process transports, one `step` at a time, and injects faults.

A step is a greeting, the copy of one page, the end of an operation with the delivery of its note, or a digest, so a
test can play every interleaving and stop a transfer half way. With `rng` the order of the links and streams and the
faults are random, and the same each time. Time passes when `now_s` is set.
"""

from __future__ import annotations

import hmac
import random
from dataclasses import dataclass

from diptych.kernels.page_pack import U8, pack_page
from diptych.kvtransfer.conversation import Down, Frame, Heard, Note, Up
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.inproc.link import Half, Operation, PageCopy, Stream
from diptych.kvtransfer.inproc.transport import InprocTransport
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.transport import InstanceId, LinkUp, NoteReceived, OpDone


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How likely each fault strikes; all zero is a perfect network."""

    drop_note: float = 0.0
    duplicate_note: float = 0.0
    delay_note: float = 0.0  # until everything queued on the link is done: later notes overtake it
    fail_op: float = 0.0  # the pages were written, the note is not sent; breaks its stream
    corrupt_page: float = 0.0  # one bit of the page flips on the way


NO_FAULTS = FaultPlan()


class InprocNetwork:
    """Joins transports by instance id."""

    def __init__(self, rng: random.Random | None = None, faults: FaultPlan = NO_FAULTS) -> None:
        self.faults = faults  # may be replaced between steps
        self.now_s = 0.0
        self._rng = rng
        self._chance = rng or random.Random(0)
        self._transports: dict[InstanceId, InprocTransport] = {}
        self._halves: list[Half] = []

    def transport(self, instance_id: InstanceId, *, only_granted: bool = False) -> InprocTransport:
        """Add an instance."""
        assert instance_id not in self._transports, "instance ids are used once"
        added = InprocTransport(instance_id, self._halves.append, lambda: self.now_s, only_granted=only_granted)
        self._transports[instance_id] = added
        return added

    def kill(self, instance_id: InstanceId) -> None:
        """End an instance as `kill -9` does: nothing of it happens any more, and its peers lose their links."""
        victim = self._transports[instance_id]
        for half in list(victim.halves.values()):
            victim.close_half(half, "killed")
        victim.die()
        for half in [half for half in self._halves if half.peer == instance_id and half.is_open]:
            self._transports[half.owner].close_half(half, "the peer was killed")

    def cut(self, one: InstanceId, other: InstanceId) -> None:
        """Break the link between two instances; both see it."""
        for owner, peer in ((one, other), (other, one)):
            half = self._transports[owner].halves.get(peer)
            if half is not None:
                self._transports[owner].close_half(half, "the network was cut")

    def step(self) -> bool:
        """Perform one action. Return False when there is none."""
        busy: list[Half | InprocTransport] = [half for half in self._halves if half.is_busy]
        busy += [transport for transport in self._transports.values() if transport.own_work and transport.is_alive]
        if not busy:
            return False
        chosen = self._rng.choice(busy) if self._rng else busy[0]
        if isinstance(chosen, InprocTransport):
            self._do_own_work(chosen)
        else:
            self._advance(chosen)
        return True

    def deliver_all(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def _advance(self, half: Half) -> None:
        self._halves.remove(half)
        if half.outbox:
            self._greet(half, half.outbox.popleft())
        elif stream := half.next_stream(self._rng):
            self._advance_stream(half, stream)
        else:
            late = half.late.popleft()
            self._deliver(half, late.data, late.digest)
        if half.is_open or half.is_busy:
            self._halves.append(half)  # the last in turn

    def _greet(self, half: Half, frame: Frame) -> None:
        """Bring a greeting or a goodbye to the peer. A half that finds nobody, or not who it knew, is closed."""
        peer = self._transports.get(half.peer)
        if peer is None or not peer.is_alive:
            self._close(half, "no such instance")
        elif not hmac.compare_digest(half.key, peer.link_key):
            peer.num_unauthenticated += 1
            self._close(half, "no answer: the peer has another key")
        else:
            self._carry(half, frame)

    def _close(self, half: Half, reason: str) -> None:
        if half.is_open:
            self._transports[half.owner].close_half(half, reason)

    def _carry(self, half: Half, frame: Frame) -> bool:
        """Let the peer's half hear a frame; return whether it is of the same link."""
        peer, now_ns = self._transports[half.peer], int(self.now_s * 1e9)
        other = peer.halves.get(half.owner)
        known = other.conversation.peer_session if other else 0
        heard = other.conversation.receive(frame, now_ns) if other else None
        if other is None or heard is None:
            return False
        for each in heard:
            self._obey(peer, half, other, each)
        if other.is_open and other.conversation.peer_session > known:
            other.outbox.append(other.conversation.beat(now_ns))  # so that the peer hears its own session
        return True

    def _obey(self, peer: InprocTransport, half: Half, other: Half, heard: Heard) -> None:
        match heard:
            case Up():
                other.partner = half
                peer.inbox.push(LinkUp(half.owner))
            case Down(reason):
                peer.close_half(other, reason)
            case Note(data, digest):
                peer.inbox.push(NoteReceived(half.owner, data, digest))

    def _advance_stream(self, half: Half, stream: Stream) -> None:
        operation = stream.operations[0]
        if stream.is_broken:
            self._fail(half, stream, "an earlier operation of its stream failed")
        elif self.now_s > operation.deadline_s:
            self._fail(half, stream, "timed out")
        elif operation.pages and not self._transports[half.peer].may_write(half.owner, operation.pages[0].dst):
            self._refuse_page(half)
        elif operation.pages:
            self._copy(half, operation)
        elif self._strikes(self.faults.fail_op):
            self._fail(half, stream, "injected fault")
        else:
            self._finish(half, stream, stream.operations.popleft())

    def _fail(self, half: Half, stream: Stream, reason: str) -> None:
        stream.is_broken = stream.name != 0
        self._transports[half.owner].inbox.push(OpDone(stream.operations.popleft().name, reason))

    def _refuse_page(self, half: Half) -> None:
        """The peer was not granted the page: its link ends."""
        peer = self._transports[half.peer]
        peer.num_ungranted += 1
        if half.partner is not None and half.partner.is_open:
            peer.close_half(half.partner, "a page message for pages that were not granted to the peer")
        self._transports[half.owner].close_half(half, "the peer closed the link")

    def _copy(self, half: Half, operation: Operation) -> None:
        source, target = self._transports[half.owner].pool, self._transports[half.peer].pool
        assert source is not None
        assert target is not None
        page = operation.pages.popleft()
        window = page.runs.window
        at = page.dst * target.layout.page_nbytes + window.dst
        piece = bytearray(_bytes(page, source)[window.src : window.src + window.nbytes].tobytes())
        if operation.digest is not None:
            operation.digest = add_digests(operation.digest, digest_bytes(piece, at))
        if self._strikes(self.faults.corrupt_page):
            piece[self._chance.randrange(window.nbytes)] ^= 1 << self._chance.randrange(8)
        target.memory[at : at + window.nbytes] = piece
        half.bytes_sent += window.nbytes

    def _finish(self, half: Half, stream: Stream, operation: Operation) -> None:
        self._transports[half.owner].inbox.push(OpDone(operation.name, None, operation.digest))
        if operation.digest is not None:
            stream.digest = add_digests(stream.digest or 0, operation.digest)
        if operation.note:
            digest = stream.digest if operation.note_digest is None else operation.note_digest
            stream.digest = None
            self._send(half, operation.note, digest)
        half.forget_if_over(stream)

    def _send(self, half: Half, note: bytes, digest: int | None) -> None:
        if self._strikes(self.faults.drop_note):
            return
        if self._strikes(self.faults.delay_note):
            half.late.append(Note(note, digest))
            return
        for _ in range(2 if self._strikes(self.faults.duplicate_note) else 1):
            self._deliver(half, note, digest)

    def _deliver(self, half: Half, note: bytes, digest: int | None) -> None:
        self._carry(half, half.conversation.next_frame(note, is_last=True, digest=digest))

    def _do_own_work(self, transport: InprocTransport) -> None:
        work, pool = transport.own_work.popleft(), transport.pool
        assert pool is not None
        while not work.go_on(pool):
            pass
        transport.inbox.push(OpDone(work.operation, None, work.digest))

    def _strikes(self, probability: float) -> bool:
        return probability > 0 and self._chance.random() < probability


def _bytes(page: PageCopy, source: HostPool) -> U8:
    """A page of the source, or an image, as it leaves."""
    rows, pack = source.rows, page.runs.pack
    return rows[page.src : page.src + 1].ravel() if pack is None else pack_page(pack, rows, page.runs.src, page.src)
