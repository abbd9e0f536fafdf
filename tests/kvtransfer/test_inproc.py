"""The in-process network: explicit delivery, faults, and what a half-open link can still do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from diptych.kvtransfer.errors import PeerUnreachable
from diptych.kvtransfer.inproc import FaultPlan, InprocNetwork, InprocTransport
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, PageWrite, TransportEvent

LAYOUT = PoolLayout.kv(num_pages=8, num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
ALL = np.arange(8)

Pair = tuple[InprocTransport, InprocTransport]


def linked_pair(network: InprocNetwork) -> Pair:
    one, two = network.transport(1), network.transport(2)
    for transport in (one, two):
        pool = transport.allocate_pool(LAYOUT)
        pool.buffer[:] = random.Random(transport.instance_id).randbytes(LAYOUT.nbytes)
    one.connect(2, two.metadata())
    two.connect(1, one.metadata())
    network.deliver_all()
    assert (one.poll(), two.poll()) == ([LinkUp(2)], [LinkUp(1)])
    return one, two


def notes(events: list[TransportEvent]) -> list[bytes]:
    return [event.data for event in events if isinstance(event, NoteReceived)]


def pages_that_arrived(one: InprocTransport, two: InprocTransport) -> int:
    assert one.pool
    assert two.pool
    parts = [slice(page * LAYOUT.page_nbytes, (page + 1) * LAYOUT.page_nbytes) for page in ALL]
    return sum(one.pool.buffer[part] == two.pool.buffer[part] for part in parts)


def test_nothing_happens_without_a_step() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    one.write_pages(2, PageWrite(ALL, ALL), b"note")
    assert (one.poll(), two.poll(), pages_that_arrived(one, two)) == ([], [], 0)


def test_one_step_copies_one_page() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    op = one.write_pages(2, PageWrite(ALL, ALL), b"note")
    for steps in range(1, 9):
        network.step()
        assert (pages_that_arrived(one, two), two.poll()) == (steps, [])
    network.step()
    assert (one.poll(), two.poll()) == ([OpDone(op, None)], [NoteReceived(1, b"note")])
    assert not network.step()


def test_a_writer_killed_half_way_leaves_half_of_the_pages_and_no_note() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    one.write_pages(2, PageWrite(ALL, ALL), b"note")
    for _ in range(4):
        network.step()
    network.kill(1)
    network.deliver_all()
    assert two.poll() == [LinkDown(1, "the peer was killed")]
    assert pages_that_arrived(one, two) == 4
    assert two.writer_gone(1)


def test_a_killed_target_fails_every_operation_before_the_link() -> None:
    network = InprocNetwork()
    one, _ = linked_pair(network)
    ops = [one.write_pages(2, PageWrite(ALL, ALL)), one.send_note(2, b"note")]
    network.step()
    network.kill(2)
    reason = "the peer was killed"
    assert one.poll() == [OpDone(ops[0], reason), OpDone(ops[1], reason), LinkDown(2, reason)]


def test_until_the_writer_hears_of_the_end_its_writes_still_land() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    one.write_pages(2, PageWrite(ALL, ALL))
    two.disconnect(1)
    assert two.poll() == [LinkDown(1, "disconnected")]
    assert not two.writer_gone(1)
    network.step()
    assert pages_that_arrived(one, two) == 1
    network.deliver_all()
    assert one.poll()[-1] == LinkDown(2, "the peer closed the link")
    assert two.writer_gone(1)


def test_a_failed_reconnect_does_not_prove_that_the_writer_is_gone() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    one.write_pages(2, PageWrite(ALL, ALL))
    two.disconnect(1)
    two.connect(1, one.metadata())
    two.disconnect(1)
    assert not two.writer_gone(1)


def test_a_cut_network_takes_the_link_from_both_sides() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    op = one.write_pages(2, PageWrite(ALL, ALL))
    network.cut(1, 2)
    assert one.poll() == [OpDone(op, "the network was cut"), LinkDown(2, "the network was cut")]
    assert two.poll() == [LinkDown(1, "the network was cut")]
    with pytest.raises(PeerUnreachable):
        one.send_note(2, b"note")


def test_connecting_to_nobody_ends_the_link() -> None:
    network = InprocNetwork()
    one, two = linked_pair(network)
    one.connect(3, two.metadata())
    network.deliver_all()
    assert one.poll() == [LinkDown(3, "no such instance")]


def test_dropped_notes_do_not_arrive_though_their_operation_is_done() -> None:
    network = InprocNetwork(faults=FaultPlan(drop_note=1.0))
    one, two = linked_pair(network)
    op = one.write_pages(2, PageWrite(ALL, ALL), b"note")
    network.deliver_all()
    assert (one.poll(), two.poll(), pages_that_arrived(one, two)) == ([OpDone(op, None)], [], 8)


def test_duplicated_notes_arrive_twice() -> None:
    network = InprocNetwork(faults=FaultPlan(duplicate_note=1.0))
    one, two = linked_pair(network)
    one.send_note(2, b"note")
    network.deliver_all()
    assert notes(two.poll()) == [b"note", b"note"]


def test_delayed_notes_are_overtaken() -> None:
    network = InprocNetwork(faults=FaultPlan(delay_note=1.0))
    one, two = linked_pair(network)
    one.send_note(2, b"first")
    one.send_note(2, b"second")
    network.step()
    network.faults = FaultPlan()
    network.deliver_all()
    assert notes(two.poll()) == [b"second", b"first"]


def test_failed_operations_send_no_note() -> None:
    network = InprocNetwork(faults=FaultPlan(fail_op=1.0))
    one, two = linked_pair(network)
    op = one.write_pages(2, PageWrite(ALL, ALL), b"note")
    network.deliver_all()
    assert (one.poll(), two.poll()) == ([OpDone(op, "injected fault")], [])


def test_a_corrupted_page_differs_in_one_bit() -> None:
    network = InprocNetwork(faults=FaultPlan(corrupt_page=1.0))
    one, two = linked_pair(network)
    one.write_pages(2, PageWrite(ALL[:1], ALL[:1]))
    network.deliver_all()
    assert one.pool
    assert two.pool
    sent, received = (pool.buffer[: LAYOUT.page_nbytes] for pool in (one.pool, two.pool))
    assert sum((a ^ b).bit_count() for a, b in zip(sent, received, strict=True)) == 1


def test_the_same_seed_plays_the_same_run() -> None:
    def play(seed: int) -> list[bytes]:
        faults = FaultPlan(drop_note=0.2, duplicate_note=0.2, delay_note=0.3, fail_op=0.1)
        network = InprocNetwork(random.Random(seed), faults)
        one, two = linked_pair(network)
        for number in range(50):
            one.send_note(2, b"%d" % number)
        network.deliver_all()
        return notes(two.poll())

    assert play(1) == play(1)
    assert play(1) != play(2)
