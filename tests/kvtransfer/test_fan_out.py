"""Workers with other numbers of ranks, as their schedulers see them: one link, whose pages and notes come whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ended_log import end_log

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import NoRanks, RankLog
from diptych.engine.tensor_parallel.tp_model_worker import RankTransfer, TpModelWorker
from diptych.engine.tensor_parallel.transfers.rank_id import rank_id
from diptych.engine.tensor_parallel.transfers.ranked_link import ranked_metadata
from diptych.engine.tensor_parallel.transfers.transport import TensorParallelTransport
from diptych.kvtransfer.errors import LayoutMismatch, PeerUnreachable
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.plan import Shard
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, PageWrite, TransportEvent

HEADS, LAYERS, DIM, NUM_PAGES = 4, 2, 16, 16
LEFT, RIGHT, ROOM = 1, 2, 77
Array = np.ndarray[Any, Any]


class Worker:
    """All ranks of an instance."""

    def __init__(
        self,
        network: InprocNetwork,
        instance_id: int,
        num_ranks: int,
        endpoint: str,
        page_size: int,
        heads: int,
        num_stages: int = 1,
    ) -> None:
        """`num_stages`, of one layer each, that have `num_ranks` each."""
        self.instance_id = instance_id
        shares = [HeadShare(rank, num_ranks, heads) if num_ranks > 1 else None for rank in range(num_ranks)]
        own = max(1, heads // num_ranks)
        self.layouts = [PoolLayout.kv(NUM_PAGES, LAYERS, page_size, own, DIM, "float32", share) for share in shares]
        if num_stages > 1:
            self.layouts = [of_stage(layout, layer) for layer in range(num_stages) for layout in self.layouts]
        num_ranks *= num_stages
        self.log = RankLog(HostChannels(endpoint), num_ranks) if num_ranks > 1 else NoRanks()
        first, *others = [network.transport(rank_id(instance_id, rank)) for rank in range(num_ranks)]
        self.transport = TensorParallelTransport(first, self.layouts[0], self.log)
        self.pools = [first.allocate_pool(self.layouts[0])]
        self.ranks: list[tuple[TpModelWorker, RankTransfer]] = []
        for rank, transport in enumerate(others, 1):
            channel = TpModelWorker(HostChannels(endpoint), rank)
            self.pools.append(transport.allocate_pool(self.layouts[rank]))
            self.ranks.append((channel, RankTransfer(transport, self.pools[rank])))
        self.metadata = ranked_metadata(transport.metadata() for transport in (first, *others))
        self.events: list[TransportEvent] = []

    def step(self) -> None:
        for channel, transfer in self.ranks:
            _reads_the_end(channel, transfer)
            channel.report(transfer)

    def poll(self) -> None:
        self.events += self.transport.poll()

    def fill(self, kv: Array) -> None:
        """Give every rank its part of `[num_pages, layers, 2, page_size, heads, dim]`."""
        for pool, layout in zip(self.pools, self.layouts, strict=True):
            (shard,) = Shard.all_of(layout)
            self._view(pool, layout)[:] = kv[:, shard.region.layers, ..., shard.first_head : shard.end_head, :]

    def assert_holds(self, kv: Array, pages: list[int]) -> None:
        for pool, layout in zip(self.pools, self.layouts, strict=True):
            (shard,) = Shard.all_of(layout)
            found = self._view(pool, layout)[pages]
            assert np.array_equal(found, kv[:, shard.region.layers, ..., shard.first_head : shard.end_head, :])

    def _view(self, pool: Any, layout: PoolLayout) -> Array:
        return np.frombuffer(pool.buffer, np.float32).reshape(layout.shape)

    def close(self) -> None:
        self.transport.close()
        if isinstance(self.log, RankLog):
            end_log(self.log, *(partial(_reads_the_end, channel, transfer) for channel, transfer in self.ranks))
        for channel, _ in self.ranks:
            channel.close()


def _reads_the_end(channel: TpModelWorker, transfer: RankTransfer) -> bool:
    return channel.apply_due(None, transfer, None)  # type: ignore[arg-type]


def of_stage(layout: PoolLayout, layer: int) -> PoolLayout:
    region = replace(layout.sole_region, layers=(layer,), total_layers=layout.sole_region.layers)
    return replace(layout, regions=(region,))


class Both:
    """Two workers and what is between them."""

    def __init__(
        self,
        endpoint: str,
        num_left: int,
        num_right: int,
        page_sizes: tuple[int, int],
        heads: int,
        stages: tuple[int, int],
    ) -> None:
        self.network = InprocNetwork()
        sizes = ((LEFT, num_left, page_sizes[0], stages[0]), (RIGHT, num_right, page_sizes[1], stages[1]))
        self.left, self.right = (
            Worker(self.network, name, ranks, f"{endpoint}{name}", size, heads, num_stages)
            for name, ranks, size, num_stages in sizes
        )

    def link(self) -> None:
        self.left.transport.connect(RIGHT, self.right.metadata)
        self.right.transport.connect(LEFT, self.left.metadata)
        self.play(lambda: LinkUp(RIGHT) in self.left.events and LinkUp(LEFT) in self.right.events)
        self.left.events.clear()
        self.right.events.clear()

    def play(self, until: Callable[[], bool]) -> None:
        for _ in range(2000):
            for worker in (self.left, self.right):
                worker.step()
                worker.poll()
            if until():
                return
            self.network.step()
        raise AssertionError(f"never; {self.left.events}, {self.right.events}")

    def write(self, src: list[int], dst: list[int], note: bytes = b"", **flow: Any) -> int:
        write = PageWrite(np.array(src), np.array(dst))
        return self.left.transport.write_pages(RIGHT, write, note, Flow(ROOM, with_digest=True, **flow))

    def done(self, worker: Worker, op: int) -> OpDone:
        self.play(lambda: any(isinstance(event, OpDone) and event.op == op for event in worker.events))
        return next(event for event in worker.events if isinstance(event, OpDone) and event.op == op)

    def close(self) -> None:
        self.left.close()
        self.right.close()


Make = Callable[..., Both]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Both] = []

    def make(
        left: int,
        right: int,
        page_sizes: tuple[int, int] = (8, 8),
        heads: int = HEADS,
        stages: tuple[int, int] = (1, 1),
    ) -> Both:
        made.append(Both(f"ipc://{tmp_path}/{len(made)}-", left, right, page_sizes, heads, stages))
        made[-1].link()
        return made[-1]

    yield make
    for both in made:
        both.close()


def some_kv(num_pages: int, page_size: int, heads: int = HEADS) -> Array:
    shape = (num_pages, LAYERS, 2, page_size, heads, DIM)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("left", "right", "heads", "stages"),
    [
        *((1, 1, 4, (1, 1)), (2, 1, 4, (1, 1)), (1, 2, 4, (1, 1)), (4, 2, 4, (1, 1)), (2, 4, 4, (1, 1))),
        *(
            (4, 1, 4, (1, 1)),
            (3, 2, 6, (1, 1)),
            (4, 2, 2, (1, 1)),
            (2, 3, 6, (1, 1)),
            (3, 4, 12, (1, 1)),
            (2, 3, 6, (2, 2)),
            (4, 1, 1, (1, 1)),
            (1, 4, 2, (1, 1)),
        ),
        *((1, 1, 4, (2, 1)), (2, 1, 4, (2, 1)), (2, 4, 2, (2, 1)), (1, 2, 4, (1, 2)), (4, 1, 4, (2, 2))),
    ],
)
def test_a_note_comes_after_every_part_and_carries_the_digest_of_them_all(
    make: Make, left: int, right: int, heads: int, stages: tuple[int, int]
) -> None:
    both = make(left, right, heads=heads, stages=stages)
    kv = some_kv(NUM_PAGES, 8, heads)
    both.left.fill(kv)
    src, dst = [3, 9, 4], [7, 1, 2]
    op = both.write(src, dst, b"all is there")
    both.play(lambda: any(isinstance(event, NoteReceived) for event in both.right.events))
    (note,) = [event for event in both.right.events if isinstance(event, NoteReceived)]
    landed = both.done(both.right, both.right.transport.digest_pages(np.array(dst))).digest
    assert note == NoteReceived(LEFT, b"all is there", landed)
    if both.right.transport.lands_in_parts(LEFT):
        unpacked = both.right.transport.unpack_pages(LEFT, np.array(dst))
        assert both.done(both.right, unpacked).error is None
    both.right.assert_holds(kv[src], dst)
    assert both.done(both.left, op) == OpDone(op, None, landed)


def test_between_one_rank_and_one_operations_are_the_transports_own(make: Make) -> None:
    both = make(1, 1)
    assert both.write([1], [2], b"note") == 1
    assert both.left.transport.send_note(RIGHT, b"more", stream=ROOM) == 2
    both.play(lambda: len(both.left.events) == len(both.right.events) == 2)
    assert both.left.events == [OpDone(1, None, both.left.events[0].digest), OpDone(2, None)]  # type: ignore[union-attr]
    assert both.right.transport.digest_pages(np.array([2])) == 1


def test_between_one_rank_and_one_a_link_that_broke_comes_back(make: Make) -> None:
    both = make(1, 1)
    op = both.write([1, 2], [3, 4], b"never to come")
    both.network.cut(LEFT, RIGHT)
    both.play(lambda: len(both.left.events) == 2 and len(both.right.events) == 1)
    assert both.left.events == [OpDone(op, "the network was cut"), LinkDown(RIGHT, "the network was cut")]
    assert both.right.transport.writer_gone(LEFT)
    with pytest.raises(PeerUnreachable):
        both.left.transport.send_note(RIGHT, b"note")
    both.left.transport.disconnect(RIGHT)
    both.link()
    assert both.done(both.left, both.write([1], [2])).error is None


def test_one_rank_talks_to_peers_of_one_and_of_several(make: Make, tmp_path: Path) -> None:
    both = make(1, 2)
    third = Worker(both.network, 3, 1, f"ipc://{tmp_path}/third", 8, HEADS)
    both.left.transport.connect(3, third.metadata)
    third.transport.connect(LEFT, both.left.metadata)
    both.play(lambda: LinkUp(3) in both.left.events)
    ops = [both.left.transport.send_note(3, b"straight"), both.write([1], [2], b"in parts")]
    assert [both.done(both.left, op).error for op in ops] == [None, None]
    third.poll()
    assert [event.data for event in third.events if isinstance(event, NoteReceived)] == [b"straight"]
    third.close()


def test_pages_of_another_size_come_from_several_ranks(make: Make) -> None:
    both = make(2, 1, (4, 8))
    kv = some_kv(NUM_PAGES, 4)
    both.left.fill(kv)
    assert both.done(both.left, both.write([5, 6, 8, 2], [9, 3])).error is None
    both.done(both.right, both.right.transport.unpack_pages(LEFT, np.array([9, 3])))
    wanted = np.stack([np.concatenate([kv[a], kv[b]], axis=2) for a, b in ((5, 6), (8, 2))])
    both.right.assert_holds(wanted, [9, 3])


def test_what_two_stages_sent_in_parts_is_unpacked_as_one_operation(make: Make) -> None:
    both = make(2, 1, (4, 8), stages=(2, 1))
    kv = some_kv(NUM_PAGES, 4)
    both.left.fill(kv)
    assert both.done(both.left, both.write([5, 6, 8, 2], [9, 3])).error is None
    unpacked = both.right.transport.unpack_pages(LEFT, np.array([9, 3]))
    assert both.done(both.right, unpacked).error is None
    wanted = np.stack([np.concatenate([kv[a], kv[b]], axis=2) for a, b in ((5, 6), (8, 2))])
    both.right.assert_holds(wanted, [9, 3])


def test_what_follows_on_a_stream_waits_for_the_slowest_part(make: Make) -> None:
    both = make(1, 2)
    ops = [both.write([1], [2]), both.left.transport.send_note(RIGHT, b"first", stream=ROOM), both.write([3], [4])]
    last = both.left.transport.send_note(RIGHT, b"second", stream=ROOM)
    assert {both.done(both.left, op).error for op in (*ops, last)} == {None}
    both.play(lambda: len(both.right.events) == 2)
    assert [event.data for event in both.right.events if isinstance(event, NoteReceived)] == [b"first", b"second"]


@pytest.mark.parametrize(("left", "right"), [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("last", [False, True])
def test_a_link_that_breaks_between_two_ranks_is_down_as_a_whole(make: Make, left: int, right: int, last: bool) -> None:
    both = make(left, right)
    op = both.write([1, 2], [3, 4], b"never to come")
    ends = (rank_id(LEFT, left - 1), rank_id(RIGHT, right - 1)) if last else (LEFT, RIGHT)
    both.network.cut(*ends)
    both.play(lambda: any(isinstance(event, LinkDown) for event in both.left.events))
    both.play(lambda: any(isinstance(event, LinkDown) for event in both.right.events))
    assert [type(event) for event in both.left.events] == [OpDone, LinkDown]
    assert both.done(both.left, op).error
    assert [type(event) for event in both.right.events] == [LinkDown]
    with pytest.raises(PeerUnreachable):
        both.write([1], [2])
    both.left.events.clear()
    both.right.events.clear()
    both.link()
    assert both.done(both.left, both.write([1], [2])).error is None


def test_a_writer_is_gone_when_all_of_its_ranks_are(make: Make) -> None:
    both = make(2, 1)
    both.network.kill(rank_id(LEFT, 1))
    both.right.poll()
    assert LinkDown not in map(type, both.right.events)  # rank 0 has not heard of it
    assert not both.right.transport.writer_gone(LEFT)
    both.network.kill(LEFT)
    both.right.poll()
    assert both.right.transport.writer_gone(LEFT)


def test_another_model_is_refused_by_the_first_rank(make: Make, tmp_path: Path) -> None:
    both = make(2, 1)
    other = Worker(both.network, 3, 1, f"ipc://{tmp_path}/other", 8, heads=8)
    with pytest.raises(LayoutMismatch, match="another model"):
        both.left.transport.connect(3, other.metadata)
    other.close()
