"""Pages that land in pools of another layout, over every transport and path, compared byte by byte with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from diptych.kernels.page_pack import cast
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.plan import Shard, linked_ranks
from diptych.kvtransfer.transport import NoteReceived, OpDone
from tests.kvtransfer.conftest import device_kinds, nixl

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]
Array = np.ndarray[Any, Any]

HEADS, LAYERS, DIM, NUM_PAGES = 4, 4, 32, 32
NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "fp8_e4m3": np.uint8}


def layouts(num_ranks: int, page_size: int, dtype: str, heads: int = HEADS) -> list[PoolLayout]:
    own = max(1, heads // num_ranks)
    shares = [HeadShare(rank, num_ranks, heads) if num_ranks > 1 else None for rank in range(num_ranks)]
    return [PoolLayout.kv(NUM_PAGES, LAYERS, page_size, own, DIM, dtype, share) for share in shares]


def shard_of(layout: PoolLayout) -> Shard:
    (shard,) = Shard.all_of(layout)
    return shard


@dataclass(frozen=True)
class Case:
    """A prompt of `[start, end)` tokens that the target lacks goes from one worker to another."""

    src: Sequence[PoolLayout]
    dst: Sequence[PoolLayout]
    start: int
    end: int

    @property
    def src_pages(self) -> list[int]:
        size = self.src[0].page_size
        return [NUM_PAGES - 1 - page for page in range(self.start // size, -(-self.end // size))]

    @property
    def dst_pages(self) -> list[int]:
        num_pages = -(-(self.end - self.start) // self.dst[0].page_size)
        return [(page * 7 + 3) % NUM_PAGES for page in range(num_pages)]

    @property
    def skip_tokens(self) -> int:
        return self.start % self.src[0].page_size


CASES = {
    "larger pages": Case(layouts(1, 4, "bfloat16"), layouts(1, 16, "bfloat16"), 16, 60),
    "smaller pages": Case(layouts(1, 16, "bfloat16"), layouts(1, 4, "bfloat16"), 20, 59),
    "narrower": Case(layouts(1, 16, "float32"), layouts(1, 16, "fp8_e4m3"), 0, 40),
    "wider": Case(layouts(1, 16, "fp8_e4m3"), layouts(1, 16, "bfloat16"), 0, 40),
    "two ranks to one": Case(layouts(2, 16, "bfloat16"), layouts(1, 16, "bfloat16"), 0, 70),
    "one rank to two": Case(layouts(1, 16, "bfloat16"), layouts(2, 16, "bfloat16"), 0, 70),
    "ranks, pages and type": Case(layouts(2, 8, "float32"), layouts(1, 16, "fp8_e4m3"), 32, 75),
    "copies of heads": Case(layouts(2, 8, "bfloat16", heads=1), layouts(1, 16, "bfloat16", heads=1), 0, 75),
}
MANY_RANKS = {
    "four ranks to two": Case(layouts(4, 16, "bfloat16"), layouts(2, 16, "bfloat16"), 16, 70),
    "two ranks to four": Case(layouts(2, 16, "bfloat16"), layouts(4, 8, "bfloat16"), 16, 70),
    "three ranks to two": Case(layouts(3, 16, "bfloat16", heads=6), layouts(2, 16, "bfloat16", heads=6), 0, 70),
    "eight copies to four": Case(layouts(8, 16, "float32", heads=2), layouts(4, 4, "bfloat16", heads=2), 0, 70),
}


class Workers:
    """The ends of all ranks of both, linked as their plans want it."""

    def __init__(self, case: Case, make: Callable[[int, PoolLayout], Any], link: Link) -> None:
        self.case = case
        self.senders = [make(100 + rank, layout) for rank, layout in enumerate(case.src)]
        self.receivers = [make(200 + rank, layout) for rank, layout in enumerate(case.dst)]
        self.linked = [
            (sender, self.receivers[rank])
            for sender, layout in zip(self.senders, case.src, strict=True)
            for rank in linked_ranks(layout, case.dst)
        ]
        for sender, receiver in self.linked:
            link(sender, receiver)
        for sender, layout in zip(self.senders, case.src, strict=True):
            sender.fill(shard_of(layout).first_head)  # copies of a head are equal
        for receiver in self.receivers:
            receiver.fill(99)

    def write(self, layers: tuple[int, int] | None = None, stream: int = 7) -> None:
        """Every rank sends what it has."""
        case = self.case
        options = {"layers": layers, "skip_tokens": case.skip_tokens, "stream": stream, "with_digest": True}
        self.ops = [
            (sender, sender.write(receiver.instance_id, case.src_pages, case.dst_pages, **options))
            for sender, receiver in self.linked
        ]

    def digests(self) -> int:
        """Wait until everything landed; return the sum of what the senders computed."""
        done = [sender.wait_done(op) for sender, op in self.ops]
        assert {event.error for event in done} == {None}
        return add_digests(*(event.digest for event in done))

    def landed(self) -> int:
        """The sum of what the receivers compute."""
        ops = [(receiver, receiver.digest_pages(self.case.dst_pages)) for receiver in self.receivers]
        return add_digests(*(receiver.wait_done(op).digest for receiver, op in ops))

    def unpack(self) -> None:
        for receiver in self.receivers:
            sender = next(sender for sender, other in self.linked if other is receiver)
            if receiver.lands_in_parts(sender.instance_id):
                op = receiver.unpack_pages(sender.instance_id, self.case.dst_pages)
                assert receiver.wait_done(op) == OpDone(op, None)

    def assert_arrived(self) -> None:
        wanted = cast(self._sent(), self.case.src[0].dtype, self.case.dst[0].dtype)
        for receiver, layout in zip(self.receivers, self.case.dst, strict=True):
            shard, count = shard_of(layout), self.case.end - self.case.start
            found = _tokens(receiver, layout, self.case.dst_pages)[:count]
            assert found.tobytes() == wanted[:, :, :, shard.first_head : shard.end_head].tobytes()

    def _sent(self) -> Array:
        """The prompt's tokens, `[tokens, layers, 2, heads, dim]`, put together from the senders."""
        shards = [shard_of(layout) for layout in self.case.src]
        count, skip = self.case.end - self.case.start, self.case.skip_tokens
        first = self.case.src[0]
        shape = (count, LAYERS, 2, shards[0].region.total_heads, DIM)
        model = np.zeros(shape, NUMPY[first.dtype])
        for sender, shard in zip(self.senders, shards, strict=True):
            part = _tokens(sender, shard.layout, self.case.src_pages)[skip : skip + count]
            model[:, :, :, shard.first_head : shard.end_head] = part
        return model


def _tokens(end: Any, layout: PoolLayout, pages: list[int]) -> Array:
    """`[tokens, layers, 2, heads, dim]`"""
    cells = np.frombuffer(end.read(pages), np.uint8).view(NUMPY[layout.dtype])
    kv = cells.reshape(len(pages), *layout.shape[1:])
    return np.moveaxis(kv, 3, 1).reshape(-1, LAYERS, 2, *layout.shape[4:])


@pytest.fixture
def inproc_workers(link: Link, make_inproc_end: Make) -> Callable[[Case], Workers]:
    network = InprocNetwork()
    return lambda case: Workers(case, lambda instance, layout: make_inproc_end(network, instance, layout), link)


@pytest.mark.parametrize("case", [*CASES.values(), *MANY_RANKS.values()], ids=[*CASES, *MANY_RANKS])
def test_pages_become_those_of_the_other_layout(inproc_workers: Callable[[Case], Workers], case: Case) -> None:
    workers = inproc_workers(case)
    workers.write()
    assert workers.digests() == workers.landed()
    workers.unpack()
    workers.assert_arrived()


@pytest.mark.parametrize("path", ["copy", "message"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ucx_packs_the_same_on_every_path(make_child_end: Make, link: Link, path: str, case: Case) -> None:
    workers = Workers(case, lambda instance, layout: make_child_end("shm", instance, layout), link)
    for sender, receiver in workers.linked:
        sender.use_path(receiver.instance_id, path)
    workers.write()
    assert workers.digests() == workers.landed()
    workers.unpack()
    workers.assert_arrived()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nixl_sends_the_same(make_child_end: Make, link: Link, has_nixl: None, case: Case) -> None:
    workers = Workers(case, lambda instance, layout: make_child_end("nixl-shm", instance, layout), link)
    workers.write()
    assert workers.digests() == workers.landed()
    workers.unpack()
    workers.assert_arrived()


@pytest.mark.parametrize("name", ["two ranks to one", "ranks, pages and type"])
def test_layers_that_are_sent_in_groups_make_the_same_pages(make_process_end: Make, link: Link, name: str) -> None:
    workers = Workers(CASES[name], lambda instance, layout: make_process_end(instance, layout=layout), link)
    total = 0
    for layers in ((0, 1), (1, 3), (3, 4)):
        workers.write(layers)
        total = add_digests(total, workers.digests())
    assert total == workers.landed()
    workers.unpack()
    workers.assert_arrived()


def test_a_note_carries_the_digest_of_the_pages_as_they_landed(make_process_end: Make, link: Link) -> None:
    workers = Workers(CASES["larger pages"], lambda instance, layout: make_process_end(instance, layout=layout), link)
    (sender,), (receiver,) = workers.senders, workers.receivers
    workers.write(stream=5)
    sender.note(receiver.instance_id, b"handed off", stream=5)
    note = receiver.wait_note()
    pages = np.frombuffer(receiver.read(workers.case.dst_pages), np.uint8).reshape(len(workers.case.dst_pages), -1)
    offsets = [page * pages.shape[1] for page in workers.case.dst_pages]
    digest = add_digests(*(digest_bytes(page, at) for page, at in zip(pages, offsets, strict=True)))
    assert note == NoteReceived(sender.instance_id, b"handed off", digest)


def test_a_page_goes_as_one_run_of_the_targets_bytes(make_child_end: Make, link: Link) -> None:
    workers = Workers(CASES["narrower"], lambda instance, layout: make_child_end("shm", instance, layout), link)
    workers.write()
    workers.digests()
    ((sender, receiver),) = workers.linked
    sent = sender.describe(receiver.instance_id)["bytes_sent"]
    assert sent == len(workers.case.dst_pages) * workers.case.dst[0].page_nbytes


def test_pages_of_a_peer_can_be_unpacked_when_its_link_is_gone(make_process_end: Make, link: Link) -> None:
    workers = Workers(
        CASES["two ranks to one"], lambda instance, layout: make_process_end(instance, layout=layout), link
    )
    workers.write()
    workers.digests()
    (receiver,) = workers.receivers
    for sender in workers.senders:
        receiver.disconnect(sender.instance_id)
        sender.wait_link(up=False)
    receiver.wait_link(up=False)
    workers.unpack()
    workers.assert_arrived()


def test_only_pages_of_a_peer_that_was_linked_are_unpacked(make_child_end: Make) -> None:
    end = make_child_end("shm", 1)
    with pytest.raises(Exception, match="no link"):
        end.unpack_pages(2, [1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_devices_convert_the_same(make_device_end: Make, link: Link, case: Case) -> None:
    workers = Workers(case, make_device_end, link)
    workers.write()
    assert workers.digests() == workers.landed()
    workers.unpack()
    workers.assert_arrived()


@pytest.mark.parametrize("kinds", [("tcp", "emulated-staged"), ("emulated-staged", "tcp")])
@pytest.mark.parametrize("name", ["ranks, pages and type", "one rank to two"])
def test_a_device_and_a_host_convert_for_each_other(
    make_child_end: Make, link: Link, kinds: Sequence[str], name: str
) -> None:
    def make(number: int, layout: PoolLayout) -> Any:
        return make_child_end(kinds[number // 100 - 1], number, layout)

    workers = Workers(CASES[name], make, link)
    workers.write()
    assert workers.digests() == workers.landed()
    workers.unpack()
    workers.assert_arrived()


def test_a_device_refuses_to_pack_what_is_no_whole_chunk_of_its_kernel(make_child_end: Make, link: Link) -> None:
    src, dst = (PoolLayout.kv(8, LAYERS, size, 2, 64, "bfloat16") for size in (16, 32))
    sender = make_child_end("emulated-mover", 1, src, chunk=128)
    receiver = make_child_end("emulated-mover", 2, dst)
    link(sender, receiver)
    with pytest.raises(Exception, match="PageOutOfRange"):
        sender.write(2, [1, 0], [0], b"there")


def large_pages(num_pages: int, head_dim: int, dtype: str) -> PoolLayout:
    """In float32, one layer of a page is 64 KiB for each number of a head."""
    return PoolLayout.kv(num_pages, LAYERS, 256, 32, head_dim, dtype)


@pytest.mark.parametrize(
    ("kind", "head_dim", "max_in_flight"), [("emulated-mover", 80, 32 << 20), ("emulated-staged", 16, 8 * 480 << 10)]
)
def test_pages_larger_than_a_piece_are_packed_a_part_at_a_time_and_few_at_once(
    make_child_end: Make, link: Link, kind: str, head_dim: int, max_in_flight: int
) -> None:
    src, dst = large_pages(2, head_dim, "fp8_e4m3"), large_pages(2, head_dim, "float32")
    sender, receiver = make_child_end(kind, 1, src), make_child_end(kind, 2, dst)
    link(sender, receiver)
    sender.fill(1)
    op = sender.write(2, [1, 0], [0, 1], b"there", with_digest=True)
    while not any(isinstance(event, NoteReceived) for event in receiver.events):
        assert sender.describe(2)["in_flight_bytes"] <= max_in_flight
        receiver.pump(0.01)
    status = sender.describe(2)
    assert status["bytes_sent"] == 2 * dst.page_nbytes
    assert sender.wait_done(op).digest == receiver.wait_digest([0, 1]) == receiver.wait_note().digest
    sent, found = (np.frombuffer(end.read(pages), np.uint8) for end, pages in ((sender, [1, 0]), (receiver, [0, 1])))
    assert found.tobytes() == cast(sent, "fp8_e4m3", "float32").tobytes()


def qwen3_next(page_size: int, dtype: str = "bfloat16") -> PoolLayout:
    """Keys and values of its 12 layers that have any; a page of 32 tokens has 768 KiB."""
    return PoolLayout.kv(6, 12, page_size, 2, 256, dtype)


STATES = {
    "smaller pages": (qwen3_next(64), qwen3_next(32), [1], [3, 4]),
    "larger pages": (qwen3_next(32), qwen3_next(64), [3, 5], [1]),
    "another type": (qwen3_next(64), qwen3_next(64, "fp8_e4m3"), [1], [3, 4]),
}
STATE_NBYTES = qwen3_next(64).page_nbytes


@pytest.mark.parametrize("kind", ["shm", "tcp", *device_kinds(), nixl("shm")])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_goes_to_pages_larger_than_a_message(
    make_child_end: Make, link: Link, kind: str, state: tuple[PoolLayout, PoolLayout, list[int], list[int]]
) -> None:
    *sides, src_pages, dst_pages = state
    src, dst = (replace(each, state_nbytes=STATE_NBYTES) for each in sides)
    sender, receiver = make_child_end(kind, 1, src), make_child_end(kind, 2, dst)
    link(sender, receiver)
    sender.fill(1)
    op = sender.write(2, src_pages, dst_pages, b"a state", as_bytes=True, with_digest=True)
    done = sender.wait_done(op)
    assert done.error is None
    assert done.digest == receiver.wait_digest(dst_pages)
    assert receiver.read(dst_pages) == sender.read(src_pages)


@pytest.mark.parametrize("kind", ["shm", "tcp", *device_kinds(), nixl("shm")])
def test_a_state_of_one_rank_goes_to_two_and_back(make_child_end: Make, link: Link, kind: str) -> None:
    """A page of the whole has the end of one half and the beginning of the other."""
    nbytes, unit = 2 * 5 * (96 << 10), 96 << 10
    whole = replace(PoolLayout.kv(10, 4, 64, 2, 128, "bfloat16"), state_nbytes=nbytes)
    halves = [
        replace(PoolLayout.kv(10, 4, 32, 1, 128, "bfloat16", HeadShare(rank, 2, 2)), state_nbytes=nbytes)
        for rank in range(2)
    ]
    ends = [make_child_end(kind, 2 + rank, half) for rank, half in enumerate(halves)]
    one, last = make_child_end(kind, 1, whole), make_child_end(kind, 4, whole)
    own, parts = list(range(-(-nbytes // whole.page_nbytes))), list(range(-(-nbytes // 2 // halves[0].page_nbytes)))
    one.fill(1)
    digests = []
    for number, end in enumerate(ends, 2):
        link(one, end)
        link(end, last)
        sent = one.wait_done(one.write(number, own, parts, b"a share", as_bytes=True, with_digest=True))
        assert (sent.error, sent.digest) == (None, end.wait_digest(parts))
        back = end.wait_done(end.write(4, parts, own[::-1], b"back", as_bytes=True, with_digest=True))
        assert back.error is None
        digests.append(back.digest)
    assert last.wait_digest(own[::-1]) == add_digests(*digests)
    assert last.read(own[::-1])[:nbytes] == one.read(own)[:nbytes]
    assert ends[1].read(parts)[:unit] == one.read(own)[nbytes // 2 :][:unit]


def test_a_changed_byte_is_noticed_before_parts_are_put_together(make_device_end: Make, link: Link) -> None:
    workers = Workers(CASES["two ranks to one"], make_device_end, link)
    workers.write()
    sent = workers.digests()
    (receiver,) = workers.receivers
    page = workers.case.dst_pages[1]
    landed = receiver.read([page])
    receiver.flip(page, 2)
    assert workers.landed() != sent
    receiver.flip(page, 2)
    assert workers.landed() == sent
    assert receiver.read([page]) == landed
    workers.unpack()
    assert receiver.read([page]) != landed
    assert workers.landed() != sent  # it was that of the page as it landed


def test_a_write_whose_receiver_is_gone_ends_and_the_next_receiver_gets_its_pages(
    make_device_end: Make, link: Link
) -> None:
    src, dst = large_pages(8, 16, "bfloat16"), large_pages(8, 16, "float32")
    sender, gone = make_device_end(1, src), make_device_end(2, dst)
    link(sender, gone)
    sender.fill(1)
    ops = [sender.write(2, list(range(8)), list(range(8)), stream=number) for number in range(1, 5)]
    gone.kill()
    down = sender.wait_link(up=False)
    assert {sender.wait_done(op).error for op in ops} <= {None, down.reason}
    heir = make_device_end(3, dst)
    link(sender, heir)
    op = sender.write(3, [5], [2], with_digest=True)
    assert sender.wait_done(op).digest == heir.wait_digest([2])
