from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.common.members.roles import Role
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler.links.linking import RECONNECT_S, RETEST_S
from diptych.engine.scheduler.links.links import Links, directions_of
from diptych.engine.scheduler.links.posting import PageGrants, Posting
from diptych.engine.scheduler.links.tester import LinkTester
from diptych.engine.scheduler.news import News
from diptych.engine.values.events import (
    DigestPages,
    Event,
    HandOffSent,
    NoteArrived,
    PagesDigested,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    SendNote,
    StreamPages,
    UnpackPages,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.inproc.network import FaultPlan
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.notes import Ack, HandOff
from diptych.kvtransfer.probe import notes
from diptych.kvtransfer.probe.notes import Directions, ProbeEnd
from diptych.kvtransfer.probe.two_way import GREETING_TIMEOUT_S
from diptych.kvtransfer.probe.writer import TIMEOUT_S
from diptych.kvtransfer.transport import OpDone, PageWrite, Pool
from diptych.v1 import engine_pb2, worker_pb2

PAIR = (Role.PREFILL, Role.DECODE)
SIZES: dict[str, Any] = {
    "num_pages": 8,
    "num_layers": 3,
    "page_size": 4,
    "num_kv_heads": 1,
    "head_dim": 4,
    "dtype": "float32",
}
LAYOUT = PoolLayout.kv(**SIZES)
WINDOWS = ((0, 2), (2, 3))
FLOW = Flow(stream=5)
HAND_OFF = HandOff(5, first_token=7, finish=None, num_pages=2, generations=(1, 1), cached_tokens=0)


class Two:
    """Two links over one network; `settle` delivers everything."""

    def __init__(self, reader_layout: PoolLayout = LAYOUT, roles: tuple[Role, Role] = PAIR) -> None:
        self.network = InprocNetwork()
        self.transports = {number: self.network.transport(number) for number in (1, 2)}
        layouts = {1: LAYOUT, 2: reader_layout}
        self.pools = {number: each.allocate_pool(layouts[number]) for number, each in self.transports.items()}
        self.now_s = 0.0
        self.links = {number: self.new_links(number, role) for number, role in enumerate(roles, 1)}

    def new_links(self, number: int, role: Role) -> Links:
        rule = PathRule("copy" if role is Role.PREFILL else "auto")
        transport = self.transports[number]
        tester = LinkTester(transport, self.pools[number], directions_of(role), rule, lambda: self.now_s)
        return Links(transport, transport, tester, WINDOWS)

    def introduce(self) -> None:
        for number, other in ((1, 2), (2, 1)):
            self.links[number].linking.set_peers({other: self.transports[other].metadata()}, self.now_s)

    def settle(self) -> None:
        self.network.deliver_all()

    def meet(self) -> dict[int, list[Event]]:
        """Deliver and answer until nobody has anything to say; return what each side's scheduler heard."""
        heard: dict[int, list[Event]] = {1: [], 2: []}
        while self.network.step():
            self.settle()
            for number, links in self.links.items():
                heard[number] += links.poll(set())
        return heard


@pytest.fixture
def two() -> Two:
    two = Two()
    two.introduce()
    assert two.meet() == {1: [PeerUp(2)], 2: [PeerUp(1)]}
    return two


def pages(*indices: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(indices, dtype=np.int32)


def fill(pool: Pool) -> None:
    pool.buffer[:] = bytes(index % 255 + 1 for index in range(len(pool.buffer)))


def layers(pool: Pool, *indices: int) -> list[bytes]:
    """What pages hold, by layer."""
    by_layer = np.frombuffer(pool.buffer, np.uint8).reshape(LAYOUT.num_pages, LAYOUT.num_layers, -1)
    return [by_layer[list(indices), layer].tobytes() for layer in range(LAYOUT.num_layers)]


def test_pages_and_their_note_arrive_and_the_write_is_reported(two: Two) -> None:
    fill(two.pools[1])
    two.links[1].posting.perform(WritePages(5, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    two.links[1].posting.perform(SendNote(2, HAND_OFF, stream=5))
    two.settle()
    assert two.links[2].poll(set()) == [NoteArrived(1, HAND_OFF)]
    assert two.links[1].poll(set()) == [WriteDone(5, None)]
    assert layers(two.pools[2], 3, 4) == layers(two.pools[1], 1, 2)
    assert two.links[1].posting.num_pages_sent == 2


def test_a_digest_that_is_wanted_travels_with_the_note_and_is_what_the_receiver_computes(two: Two) -> None:
    fill(two.pools[1])
    flow = Flow(stream=5, with_digest=True)
    two.links[1].posting.perform(WritePages(5, 2, PageWrite(pages(1), pages(3)), flow))
    two.links[1].posting.perform(WritePages(5, 2, PageWrite(pages(2), pages(4)), flow))
    two.links[1].posting.perform(SendNote(2, HAND_OFF, stream=5))
    two.settle()
    two.links[2].posting.perform(DigestPages(5, pages(3, 4)))
    two.settle()
    ends = [event for event in two.links[1].poll(set()) if isinstance(event, WriteDone)]
    digest = add_digests(*(end.digest or 0 for end in ends))
    assert two.links[2].poll(set()) == [NoteArrived(1, HAND_OFF, digest), PagesDigested(5, digest)]


def test_pages_that_follow_a_step_leave_by_windows_of_layers_and_end_once(two: Two) -> None:
    fill(two.pools[1])
    assert two.links[1].posting.layer_listener() is None
    two.links[1].posting.perform(StreamPages(5, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    listen = two.links[1].posting.layer_listener()
    assert listen is not None
    arrived = []
    for layer in range(3):
        listen(layer)
        two.settle()
        arrived.append([index for index, data in enumerate(layers(two.pools[2], 3, 4)) if any(data)])
    assert arrived == [[], [0, 1], [0, 1, 2]]
    assert two.links[1].posting.layer_listener() is None
    two.links[1].posting.perform(SendNote(2, HAND_OFF, stream=5))
    two.settle()
    assert layers(two.pools[2], 3, 4) == layers(two.pools[1], 1, 2)
    assert two.links[2].poll(set()) == [NoteArrived(1, HAND_OFF)]
    assert two.links[1].poll(set()) == [WriteDone(5, None)]


def test_a_link_lost_within_a_step_ends_what_followed_it_with_one_error(two: Two) -> None:
    two.links[1].posting.perform(StreamPages(5, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    listen = two.links[1].posting.layer_listener()
    assert listen is not None
    listen(0)
    listen(1)
    two.network.cut(1, 2)
    listen(2)
    two.settle()
    done, down = two.links[1].poll(set())
    assert isinstance(done, WriteDone)
    assert done.error
    assert isinstance(down, PeerDown)


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_what_follows_a_step_that_is_given_up_ends_with_one_error(two: Two, num_layers: int) -> None:
    two.links[1].posting.perform(StreamPages(5, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    listen = two.links[1].posting.layer_listener()
    assert listen is not None
    for layer in range(num_layers):
        listen(layer)
    two.links[1].posting.give_up_step()
    two.settle()
    assert two.links[1].poll(set()) == [WriteDone(5, "the step was given up")]
    assert two.links[1].posting.layer_listener() is None
    two.links[1].posting.perform(StreamPages(6, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    listen = two.links[1].posting.layer_listener()
    assert listen is not None
    for layer in range(3):
        listen(layer)
    two.settle()
    assert two.links[1].poll(set()) == [WriteDone(6, None)]


def test_a_note_alone_is_not_reported(two: Two) -> None:
    two.links[2].posting.perform(SendNote(1, Ack(5)))
    two.settle()
    assert two.links[1].poll(set()) == [NoteArrived(2, Ack(5))]
    assert two.links[2].poll(set()) == []


def test_how_long_a_hand_off_took_to_leave_is_reported(two: Two) -> None:
    events: list[Event] = []
    transport = two.transports[1]
    posting = Posting(transport, PageGrants(transport, transport), WINDOWS, events)
    posting.perform(SendNote(2, HAND_OFF))
    posting.perform(SendNote(2, Ack(6)))
    two.settle()
    for event in transport.poll():
        assert isinstance(event, OpDone)
        posting.on_done(replace(event, seconds=0.5))
    assert events == [HandOffSent(5, 0.5)]


def test_a_peer_that_leaves_the_membership_is_let_go(two: Two) -> None:
    two.links[1].linking.set_peers({}, two.now_s)
    two.settle()
    assert [type(event) for event in two.links[1].poll(set())] == [PeerDown]
    assert linked(two, 1) == []


def test_nobody_tries_again_to_reach_a_peer_that_left_the_membership(two: Two) -> None:
    two.links[1].linking.set_peers({}, two.now_s)
    two.settle()
    two.links[1].poll(set())
    assert (
        two.links[1].linking.next_retry_s() is None
    )  # a time that has passed would keep the scheduler's loop awake for ever


def test_writing_without_a_link_is_reported_as_a_failed_write(two: Two) -> None:
    two.links[1].linking.set_peers({}, two.now_s)
    two.settle()
    two.links[1].poll(set())
    two.links[1].posting.perform(WritePages(5, 2, PageWrite(pages(1), pages(1)), FLOW))
    two.links[1].posting.perform(SendNote(2, Ack(5)))
    assert two.links[1].has_events
    (event,) = two.links[1].poll(set())
    assert isinstance(event, WriteDone)
    assert event.error


def test_a_broken_link_to_a_member_is_opened_again(two: Two) -> None:
    two.network.cut(1, 2)
    two.settle()
    for number in (1, 2):
        assert [type(event) for event in two.links[number].poll(set())] == [PeerDown]
        two.links[number].linking.reconnect(RECONNECT_S / 2)
        assert two.links[number].linking.next_retry_s() == RECONNECT_S
    two.settle()
    assert two.links[1].poll(set()) == []
    two.now_s += RECONNECT_S
    for number in (1, 2):
        two.links[number].linking.reconnect(two.now_s)
    assert two.meet()[1] == [PeerUp(2)]
    assert two.links[1].linking.next_retry_s() is None


def test_a_member_that_cannot_be_linked_does_not_stop_the_others() -> None:
    two = Two()
    two.links[1].linking.set_peers({9: b"nonsense", 2: two.transports[2].metadata()}, 0.0)
    two.links[2].linking.set_peers({1: two.transports[1].metadata()}, 0.0)
    assert two.meet()[1] == [PeerUp(2)]
    assert two.links[1].linking.next_retry_s() is None


def test_a_suspect_is_cleared_once_it_cannot_write(two: Two) -> None:
    two.network.kill(2)
    two.settle()
    events = two.links[1].poll({2})
    assert isinstance(events[0], PeerDown)
    assert WriterGone(2) in events + two.links[1].poll({2})


def test_garbage_from_a_peer_is_dropped(two: Two) -> None:
    two.transports[2].send_note(1, b"\xff\xffgarbage")
    two.links[2].posting.perform(SendNote(1, Ack(5)))
    two.settle()
    assert two.links[1].poll(set()) == [NoteArrived(2, Ack(5))]


def linked(two: Two, number: int) -> list[int]:
    return list(two.links[number].load.linked_instances)


def test_routers_hear_of_links_their_speeds_and_of_what_is_on_its_way(two: Two) -> None:
    assert [linked(two, number) for number in (1, 2)] == [[2], [1]]
    two.links[1].posting.perform(WritePages(5, 2, PageWrite(pages(1, 2), pages(3, 4)), FLOW))
    assert two.links[1].queued_bytes == 2 * LAYOUT.page_nbytes
    two.settle()
    two.links[1].poll(set())
    assert two.links[1].queued_bytes == 0


def states(two: Two) -> dict[int, str]:
    return {n: worker_pb2.LinkState.Name(links.linking.status()[0].state) for n, links in two.links.items()}


def test_a_link_that_brings_wrong_bytes_is_never_used_and_tested_again_later() -> None:
    two = Two()
    two.network.faults = FaultPlan(corrupt_page=1.0)
    two.introduce()
    heard = two.meet()
    assert [type(event) for event in (*heard[1], *heard[2])] == [PeerDown, PeerDown]
    assert linked(two, 1) == linked(two, 2) == []
    for links in two.links.values():
        assert "no path works: copy: its bytes arrived wrong" in links.linking.problem
        assert links.linking.num_failures == 1
        assert links.linking.next_retry_s() == RETEST_S
    (link,) = two.links[1].linking.status()
    assert [(test.path, test.error) for test in link.tests] == [("copy", "its bytes arrived wrong")]

    two.network.faults = FaultPlan()
    two.now_s = RETEST_S
    for links in two.links.values():
        links.linking.reconnect(two.now_s)
    assert two.meet() == {1: [PeerUp(2)], 2: [PeerUp(1)]}
    assert two.links[1].linking.problem == ""


@pytest.mark.parametrize(
    "changes",
    [{"page_size": 8}, {"page_size": 2}, {"dtype": "bfloat16"}, {"page_size": 8, "dtype": "bfloat16"}],
    ids=str,
)
def test_a_link_between_pools_of_different_layouts_is_tested_as_it_will_be_used(changes: dict[str, Any]) -> None:
    two = Two(PoolLayout.kv(**{**SIZES, **changes}))
    two.introduce()
    assert two.meet() == {1: [PeerUp(2)], 2: [PeerUp(1)]}


def test_a_reader_refuses_a_path_that_is_slower_than_its_operator_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two()
    rule, reader = PathRule(requirement="shm"), two.transports[2]
    tester = LinkTester(reader, two.pools[2], directions_of(Role.DECODE), rule, lambda: 0.0)
    two.links[2] = Links(reader, reader, tester, WINDOWS)
    describe = reader.describe
    monkeypatch.setattr(reader, "describe", lambda peer: replace(describe(peer), lanes="tcp/lo"))
    two.introduce()
    two.settle()
    two.links[2].poll(set())
    for note in (Directions(out=True, into=False), ProbeEnd("message", 1e9)):
        two.transports[1].send_note(2, notes.encode(note, sender=1, target=2))
    two.settle()
    assert two.links[2].poll(set()) == []
    two.settle()
    assert [type(event) for event in two.links[2].poll(set())] == [PeerDown]
    assert "its pages go over tcp/lo (message), and --kv-require asks for shm" in two.links[2].linking.problem


def test_a_link_is_not_used_before_its_test_has_ended() -> None:
    two = Two()
    two.introduce()
    assert states(two) == {1: "LINK_STATE_CONNECTING", 2: "LINK_STATE_CONNECTING"}
    two.settle()
    assert two.links[1].poll(set()) == two.links[2].poll(set()) == []
    assert states(two) == {1: "LINK_STATE_TESTING", 2: "LINK_STATE_TESTING"}
    assert two.meet() == {1: [PeerUp(2)], 2: [PeerUp(1)]}
    assert states(two) == {1: "LINK_STATE_UP", 2: "LINK_STATE_UP"}
    assert [two.links[number].linking.status()[0].path for number in (1, 2)] == ["copy", "copy"]


@pytest.mark.parametrize(
    ("words", "timeout_s"),
    [((), GREETING_TIMEOUT_S), ((Directions(out=False, into=True),), TIMEOUT_S)],
    ids=["no greeting", "no offer"],
)
def test_a_peer_that_does_not_answer_its_test_is_let_go_in_bounded_time(
    words: tuple[Directions, ...], timeout_s: float
) -> None:
    two = Two()
    two.introduce()
    two.settle()
    two.links[1].poll(set())
    for note in words:
        two.transports[2].send_note(1, notes.encode(note, sender=2, target=1))
    two.settle()
    two.links[1].poll(set())
    assert two.links[1].linking.next_retry_s() == timeout_s
    two.now_s = timeout_s
    assert two.links[1].poll(set()) == []
    two.settle()
    assert [type(event) for event in two.links[1].poll(set())] == [PeerDown]
    assert f"within {timeout_s:g} s" in two.links[1].linking.problem


def test_an_answer_that_came_during_a_long_step_counts() -> None:
    two = Two()
    two.introduce()
    heard: list[Event] = []
    for _ in range(20):
        two.settle()
        two.links[2].poll(set())
        two.settle()
        two.now_s += 2 * TIMEOUT_S  # a step of the writer; the reader is idle
        two.links[1].linking.reconnect(two.now_s)
        heard += two.links[1].poll(set())
    assert [replace(each, bytes_per_s=0.0) for each in heard if isinstance(each, PeerUp)] == [PeerUp(2)]
    assert len(heard) == 1


def test_a_role_changes_while_a_link_that_was_refused_before_its_test_is_closed() -> None:
    two = Two()
    rule = PathRule(requirement="rdma")
    tester = LinkTester(two.transports[1], two.pools[1], directions_of(Role.PREFILL), rule, lambda: 0.0)
    two.links[1] = Links(two.transports[1], two.transports[1], tester, WINDOWS)
    two.introduce()
    two.settle()
    assert two.links[1].poll(set()) == []
    two.links[1].serve(Role.DECODE)
    two.settle()
    assert [type(event) for event in two.links[1].poll(set())] == [PeerDown]


UNIFIED = (Role.UNIFIED, Role.UNIFIED)


def paths_tested(two: Two) -> list[list[str]]:
    """What each side has tested by writing."""
    return [[test.path for test in links.linking.status()[0].tests] for links in two.links.values()]


@pytest.mark.parametrize(
    ("roles", "tested"),
    [
        ((Role.PREFILL, Role.DECODE), [["copy"], []]),
        ((Role.DECODE, Role.PREFILL), [[], ["copy"]]),
        ((Role.UNIFIED, Role.DECODE), [["copy"], ["copy"]]),
        ((Role.DECODE, Role.DECODE), [["copy"], ["copy"]]),
        ((Role.UNIFIED, Role.PREFILL), [[], ["copy"]]),
        (UNIFIED, [["copy"], ["copy"]]),
    ],
    ids=str,
)
def test_a_link_is_tested_in_each_direction_in_which_pages_may_flow(
    roles: tuple[Role, Role], tested: list[list[str]]
) -> None:
    two = Two(roles=roles)
    two.introduce()
    assert two.meet() == {1: [PeerUp(2)], 2: [PeerUp(1)]}
    assert paths_tested(two) == tested


def test_pages_go_both_ways_over_one_link() -> None:
    two = Two(roles=UNIFIED)
    two.introduce()
    two.meet()
    for number in (1, 2):
        fill(two.pools[number])
    for number, other in ((1, 2), (2, 1)):
        two.links[number].posting.perform(
            WritePages(number, other, PageWrite(pages(1), pages(3 + number)), Flow(number))
        )
    two.settle()
    assert [two.links[number].poll(set()) for number in (1, 2)] == [[WriteDone(1, None)], [WriteDone(2, None)]]
    assert layers(two.pools[2], 4) == layers(two.pools[1], 5) == layers(two.pools[1], 1)


def meet_again(two: Two) -> list[list[type[Event]]]:
    """Let both ends notice that the link is down, and open it again."""
    heard = two.meet()
    two.now_s += RECONNECT_S
    for links in two.links.values():
        links.linking.reconnect(two.now_s)
    again = two.meet()
    return [[type(event) for event in heard[number] + again[number]] for number in (1, 2)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_role_that_lets_pages_flow_another_way_has_its_links_tested_for_that(order: tuple[int, int]) -> None:
    two = Two(roles=(Role.PREFILL, Role.DECODE))
    two.introduce()
    two.meet()
    for number in order:
        two.links[number].serve(Role.UNIFIED)
        opens_anew = number == 1  # pages come to who prefilled; they may leave who decodes in any case
        assert meet_again(two) == [[PeerDown, PeerUp] if opens_anew else []] * 2
    assert paths_tested(two) == [["copy"], ["copy"]]
    assert [links.linking.num_failures for links in two.links.values()] == [0, 1]  # as the other end sees it


def test_a_role_that_wants_less_keeps_its_links() -> None:
    two = Two(roles=UNIFIED)
    two.introduce()
    two.meet()
    two.links[1].serve(Role.DECODE)
    two.links[2].serve(Role.PREFILL)
    assert two.meet() == {1: [], 2: []}


def test_pages_in_parts_are_put_together_when_the_core_wants_it() -> None:
    two = Two()
    two.introduce()
    two.meet()
    for peer, room in ((1, 5), (99, 6)):
        two.links[2].posting.perform(UnpackPages(room, peer, np.array([1, 2], np.int32)))
    two.settle()
    unpacked = two.links[2].poll(set())
    assert PagesUnpacked(5, None) in unpacked
    assert PagesUnpacked(6, f"no link to {99:016x}") in unpacked


def test_a_peer_whose_pages_can_not_be_converted_is_refused_with_the_reason() -> None:
    two = Two(PoolLayout.kv(**{**SIZES, "num_layers": 2}))
    two.introduce()
    two.meet()
    for links in two.links.values():
        (status,) = links.linking.status()
        assert status.state == worker_pb2.LINK_STATE_REFUSED
        assert "KV of another model" in status.reason
        assert "KV of another model" in links.linking.problem


def test_problems_of_links_are_told_once_when_they_come_and_when_they_go(new_engine: Callable[..., Any]) -> None:
    two, engine = Two(PoolLayout.kv(**{**SIZES, "num_layers": 2})), new_engine()
    nobody: Any = SimpleNamespace(news=lambda: None)
    news = News(engine.core, engine.cache, two.links[1], nobody, PrefillMeter())

    def told() -> str | None:
        events = engine_pb2.SchedulerEvents()
        news.report(events)
        return events.link_news.problem if events.HasField("link_news") else None

    assert told() is None
    two.introduce()
    two.meet()
    assert "KV of another model" in (told() or "")
    assert told() is None
    two.links[1].linking.set_peers({}, 0.0)
    assert told() == ""


@pytest.mark.parametrize(
    ("role", "peer", "problem"),
    [
        (Role.UNIFIED, Role.PREFILL, ""),
        (Role.UNIFIED, Role.DECODE, "there is no path put to this peer, as --kv-path asks for"),
    ],
    ids=str,
)
def test_a_pinned_path_matters_only_where_pages_are_written(role: Role, peer: Role, problem: str) -> None:
    two = Two(roles=(peer, role))
    rule, transport = PathRule("put"), two.transports[2]
    two.links[2] = Links(transport, transport, LinkTester(transport, two.pools[2], directions_of(role), rule), WINDOWS)
    two.introduce()
    heard = two.meet()[2]
    assert [type(event) for event in heard] == ([PeerDown] if problem else [PeerUp])
    assert problem in two.links[2].linking.problem


def test_what_comes_in_must_be_fast_enough_where_pages_go_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(roles=UNIFIED)
    rule, (writer, reader) = PathRule(requirement="shm"), two.transports.values()
    two.links[2] = Links(reader, reader, LinkTester(reader, two.pools[2], directions_of(Role.UNIFIED), rule), WINDOWS)
    describe, send_note = reader.describe, writer.send_note

    def say_that_it_writes_by_message(peer: int, data: bytes) -> int:
        note = notes.decode(data, sender=1, target=2)
        return send_note(
            peer, notes.encode(ProbeEnd("message"), sender=1, target=2) if type(note) is ProbeEnd else data
        )

    monkeypatch.setattr(reader, "describe", lambda peer: replace(describe(peer), lanes="tcp/lo"))
    monkeypatch.setattr(writer, "send_note", say_that_it_writes_by_message)
    two.introduce()
    assert PeerUp(1) not in two.meet()[2]
    assert "its pages go over tcp/lo (message), and --kv-require asks for shm" in two.links[2].linking.problem
