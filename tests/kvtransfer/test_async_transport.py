"""The asyncio face: awaiting operations, reading events, deadlines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from async_transport import AsyncTransport, TransferTimeout

from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.inproc import FaultPlan, InprocNetwork, InprocTransport
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, PageWrite

LAYOUT = PoolLayout.kv(num_pages=8, num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
PAGES = np.arange(8)


def linked_pair(network: InprocNetwork) -> tuple[InprocTransport, InprocTransport]:
    one, two = network.transport(1), network.transport(2)
    for transport in (one, two):
        transport.allocate_pool(LAYOUT)
    one.connect(2, two.metadata())
    two.connect(1, one.metadata())
    network.deliver_all()
    return one, two


async def deliver(network: InprocNetwork) -> None:
    """Let the operations that were begun be submitted first."""
    await asyncio.sleep(0)
    network.deliver_all()


def test_a_write_returns_when_it_is_complete_and_its_note_is_an_event() -> None:
    async def play() -> None:
        network = InprocNetwork()
        one, two = linked_pair(network)
        with AsyncTransport(one) as writer, AsyncTransport(two) as reader:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(writer.write_pages(2, PageWrite(PAGES, PAGES), b"note", timeout_s=60))
                group.create_task(deliver(network))
            events = reader.events()
            assert [await anext(events), await anext(events)] == [LinkUp(1), NoteReceived(1, b"note")]

    asyncio.run(play())


def test_a_failed_operation_raises() -> None:
    async def play() -> None:
        network = InprocNetwork(faults=FaultPlan(fail_op=1.0))
        one, _ = linked_pair(network)
        with AsyncTransport(one) as writer:
            delivery = asyncio.create_task(deliver(network))
            with pytest.raises(TransferError, match="injected fault"):
                await writer.send_note(2, b"note", timeout_s=60)
            await delivery

    asyncio.run(play())


def test_an_operation_that_takes_too_long_raises_and_its_end_comes_as_an_event() -> None:
    async def play() -> None:
        network = InprocNetwork()
        one, _ = linked_pair(network)
        with AsyncTransport(one) as writer:
            with pytest.raises(TransferTimeout):
                await writer.send_note(2, b"note", timeout_s=0.01)
            network.kill(2)
            events, reason = writer.events(), "the peer was killed"
            async with asyncio.timeout(60):
                seen = [await anext(events) for _ in range(3)]
            assert seen == [LinkUp(2), OpDone(1, reason), LinkDown(2, reason)]

    asyncio.run(play())
