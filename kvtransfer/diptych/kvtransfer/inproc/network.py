"""Performs the actions of in-process transports, one `step` at a time, and injects faults.

A step is a hello, the copy of one page, or the delivery of a note, so a test can play every interleaving and stop a
transfer half way. With `rng` the order of the links and the faults are random, and the same each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from diptych.kvtransfer.inproc.link import Bye, CopyPage, DeliverLate, Finish, Half, Hello
from diptych.kvtransfer.inproc.transport import InprocTransport
from diptych.kvtransfer.transport import InstanceId, LinkUp, NoteReceived, OpDone


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How likely each fault strikes; all zero is a perfect network."""

    drop_note: float = 0.0
    duplicate_note: float = 0.0
    delay_note: float = 0.0  # until everything queued on the link is done: later notes overtake it
    fail_op: float = 0.0  # the pages were written, the note is not sent
    corrupt_page: float = 0.0  # one bit of the page flips on the way


NO_FAULTS = FaultPlan()


class InprocNetwork:
    """Joins transports by instance id."""

    def __init__(self, rng: random.Random | None = None, faults: FaultPlan = NO_FAULTS) -> None:
        self.faults = faults  # may be replaced between steps
        self.num_stale_messages = 0  # dropped, because nobody was linked to their sender
        self._rng = rng
        self._chance = rng or random.Random(0)
        self._transports: dict[InstanceId, InprocTransport] = {}
        self._halves: list[Half] = []

    def transport(self, instance_id: InstanceId) -> InprocTransport:
        """Add an instance."""
        assert instance_id not in self._transports, "instance ids are used once"
        self._transports[instance_id] = InprocTransport(instance_id, self._halves.append)
        return self._transports[instance_id]

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
        busy = [half for half in self._halves if half.actions]
        if not busy:
            return False
        half = self._rng.choice(busy) if self._rng else busy[0]
        self._halves.remove(half)
        self._perform(half)
        if half.is_open or half.actions:
            self._halves.append(half)  # the last in turn
        return True

    def deliver_all(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def _perform(self, half: Half) -> None:
        match half.actions.popleft():
            case Hello():
                self._greet(half)
            case CopyPage(src, dst):
                self._copy(half, src, dst)
            case Finish(op, note):
                self._finish(half, op, note)
            case DeliverLate(note):
                self._deliver(half, note)
            case Bye(reason):
                if half.partner and half.partner.is_open:
                    self._transports[half.peer].close_half(half.partner, reason)

    def _greet(self, half: Half) -> None:
        if half.partner is not None:
            return  # the peer's greeting came first
        peer = self._transports.get(half.peer)
        if peer is None or not peer.is_alive:
            self._transports[half.owner].close_half(half, "no such instance")
            return
        other = peer.halves.get(half.owner)
        if other is None:
            return  # the peer greets us when it connects
        if other.partner is not None:
            peer.close_half(other, "the peer restarted the link")
            return
        half.partner, other.partner = other, half
        self._transports[half.owner].inbox.push(LinkUp(half.peer))
        peer.inbox.push(LinkUp(half.owner))

    def _copy(self, half: Half, src: int, dst: int) -> None:
        source, target = self._transports[half.owner].pool, self._transports[half.peer].pool
        assert source is not None
        assert target is not None
        page_nbytes = source.layout.page_nbytes
        page = bytearray(source.buffer[src * page_nbytes : (src + 1) * page_nbytes])
        if self._strikes(self.faults.corrupt_page):
            page[self._chance.randrange(page_nbytes)] ^= 1 << self._chance.randrange(8)
        target.buffer[dst * page_nbytes : (dst + 1) * page_nbytes] = page
        half.bytes_sent += page_nbytes

    def _finish(self, half: Half, op: int, note: bytes) -> None:
        half.ops.remove(op)
        owner = self._transports[half.owner]
        if self._strikes(self.faults.fail_op):
            owner.inbox.push(OpDone(op, "injected fault"))
            return
        owner.inbox.push(OpDone(op, None))
        if not note or self._strikes(self.faults.drop_note):
            return
        if self._strikes(self.faults.delay_note):
            half.actions.append(DeliverLate(note))
            return
        for _ in range(2 if self._strikes(self.faults.duplicate_note) else 1):
            self._deliver(half, note)

    def _deliver(self, half: Half, note: bytes) -> None:
        if half.partner and half.partner.is_open:
            self._transports[half.peer].inbox.push(NoteReceived(half.owner, note))
        else:
            self.num_stale_messages += 1

    def _strikes(self, probability: float) -> bool:
        return probability > 0 and self._chance.random() < probability
