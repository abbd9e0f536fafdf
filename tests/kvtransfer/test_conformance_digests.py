"""What every transport promises of layer windows, digests, probe pages and paths."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from diptych.kvtransfer.digest import add_digests
from diptych.kvtransfer.transport import NoteReceived, OpDone

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

LEFT, RIGHT = 1, 2
NUM_PAGES, NUM_LAYERS = 64, 4
PAGE_NBYTES = 64 << 10
ROOM = 0xFFFF_FFFF_0000_0007


@pytest.fixture
def ends(make_end: Make, link: Link) -> tuple[Any, Any]:
    left, right = make_end(LEFT), make_end(RIGHT)
    link(left, right)
    left.fill(1)
    right.fill(5)
    return left, right


def some_pages(count: int) -> tuple[list[int], list[int]]:
    chosen = random.Random(count)
    return chosen.sample(range(NUM_PAGES), count), chosen.sample(range(NUM_PAGES), count)


def test_layers_of_pages_land_and_the_other_layers_stay(ends: tuple[Any, Any]) -> None:
    left, right = ends
    src, dst = some_pages(20)
    left.write(RIGHT, src, dst, b"two layers", layers=(1, 3))
    right.wait_note()
    moved = left.reference(1, src, dst, (1, 3))
    stayed = [right.reference(5, dst, dst, layers) for layers in ((0, 1), (3, NUM_LAYERS))]
    assert right.wait_digest(dst) == add_digests(moved, *stayed)


def test_pages_that_come_layer_by_layer_are_whole_in_the_end(ends: tuple[Any, Any]) -> None:
    left, right = ends
    src, dst = some_pages(20)
    for layers in ((2, 4), (0, 1), (1, 2)):
        left.write(RIGHT, src, dst, layers=layers)
    left.note(RIGHT, b"whole")
    right.wait_note()
    assert right.digest(dst) == left.digest(src)


@pytest.mark.parametrize("layers", [(0, NUM_LAYERS + 1), (2, 2), (-1, 2)])
def test_layers_that_pages_do_not_have_are_refused(ends: tuple[Any, Any], layers: tuple[int, int]) -> None:
    left, _ = ends
    with pytest.raises(Exception, match="layers"):
        left.write(RIGHT, [1], [2], layers=layers)


def test_a_digest_is_the_references_of_the_bytes_at_their_target(ends: tuple[Any, Any]) -> None:
    left, right = ends
    src, dst = some_pages(30)
    op = left.write(RIGHT, src, dst, b"sealed", stream=ROOM, with_digest=True)
    expected = left.reference(1, src, dst)
    assert left.wait_done(op) == OpDone(op, None, expected)
    assert right.wait_note() == NoteReceived(LEFT, b"sealed", expected)
    assert right.wait_digest(dst) == expected


def test_a_stream_sums_its_digests_however_its_pages_are_cut(ends: tuple[Any, Any]) -> None:
    left, right = ends
    src, dst = some_pages(30)
    left.write(RIGHT, src[:7], dst[:7], stream=ROOM, with_digest=True)
    left.write(RIGHT, [3], [src[0]], b"other room", stream=8, with_digest=True)
    for layers in ((3, 4), (0, 3)):
        left.write(RIGHT, src[7:], dst[7:], layers=layers, stream=ROOM, with_digest=True)
    left.note(RIGHT, b"sealed", stream=ROOM)
    sealed = right.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"sealed")
    assert sealed.digest == left.reference(1, src, dst)


def test_a_note_begins_the_streams_digest_anew(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.write(RIGHT, [1], [2], b"first", stream=ROOM, with_digest=True)
    left.write(RIGHT, [3], [4], b"second", stream=ROOM, with_digest=True)
    left.note(RIGHT, b"third", stream=ROOM)
    right.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"third")
    notes = [event.digest for event in right.events if isinstance(event, NoteReceived)]
    assert notes == [left.reference(1, [1], [2]), left.reference(1, [3], [4]), None]


def test_no_digest_is_computed_that_nobody_wants(ends: tuple[Any, Any]) -> None:
    left, right = ends
    op = left.write(RIGHT, [1], [2], b"plain")
    assert right.wait_note() == NoteReceived(LEFT, b"plain")
    assert left.wait_done(op) == OpDone(op, None)


def test_a_note_carries_the_digest_it_is_given(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.write(RIGHT, [1], [2], stream=ROOM, with_digest=True)
    left.note(RIGHT, b"given", stream=ROOM, digest=2**64 - 1)
    assert right.wait_note() == NoteReceived(LEFT, b"given", 2**64 - 1)


def test_the_digest_of_no_pages_is_nothing(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.write(RIGHT, [], [], b"nothing to move", stream=ROOM, with_digest=True)
    assert right.wait_note().digest == 0
    assert right.wait_digest([]) == 0


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_byte_that_flips_in_any_layer_changes_the_digest(ends: tuple[Any, Any], layer: int) -> None:
    left, right = ends
    src, dst = some_pages(10)
    left.write(RIGHT, src, dst, b"sealed", stream=ROOM, with_digest=True)
    sealed = right.wait_note().digest
    right.flip(dst[layer], layer)
    assert right.wait_digest(dst) != sealed


def test_pages_in_each_others_place_change_the_digest(ends: tuple[Any, Any]) -> None:
    left, right = ends
    op = left.write(RIGHT, [1, 2], [4, 3], with_digest=True)
    assert left.wait_done(op).digest != left.reference(1, [1, 2], [3, 4])
    assert right.wait_digest([3, 4]) == left.wait_done(op).digest


def test_a_digest_of_pages_outside_of_the_pool_is_refused(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    with pytest.raises(Exception, match="page"):
        left.digest_pages([NUM_PAGES + (1 << 20) // PAGE_NBYTES])


def test_probe_pages_carry_most_of_a_megabyte_and_no_page_of_the_layout(ends: tuple[Any, Any]) -> None:
    left, right = ends
    probes = left.probe_pages()
    assert probes == list(range(NUM_PAGES, NUM_PAGES + 3 * (1 << 20) // PAGE_NBYTES // 4))
    untouched = right.digest(list(range(NUM_PAGES)))
    left.write(RIGHT, [3] * len(probes), probes, b"probe", with_digest=True)
    note = right.wait_note()
    assert right.wait_digest(probes) == note.digest == left.reference(1, [3] * len(probes), probes)
    assert right.digest(list(range(NUM_PAGES))) == untouched
    right.write(LEFT, probes, [0] * len(probes), b"and back")
    left.wait_note()
    assert left.digest([0]) == left.digest([3])


def test_pages_land_by_every_path_there_is(ends: tuple[Any, Any]) -> None:
    left, right = ends
    everything = list(range(NUM_PAGES))
    paths = left.paths(RIGHT)
    assert left.describe(RIGHT)["path"] in paths
    for number, path in enumerate(paths):
        left.use_path(RIGHT, path)
        assert left.describe(RIGHT)["path"] == path
        src, dst = some_pages(20 + number)
        left.fill(number)
        ops = [left.write(RIGHT, everything, everything, layers=(1, 4), with_digest=True)]
        left.wait_done(ops[0])  # writes to the same pages are in no order
        ops += [left.write(RIGHT, src[n:], dst[n:], with_digest=True) for n in range(10)]
        last = left.note(RIGHT, path.encode())
        note = right.wait_note()
        left.wait_done(last)
        right.events.clear()
        assert note.digest == add_digests(*(left.wait_done(op).digest for op in ops))
        assert right.digest(dst) == left.digest(src)


def test_a_path_that_does_not_exist_or_is_busy_is_refused(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    with pytest.raises(Exception, match="no path"):
        left.use_path(RIGHT, "pigeon")
    with pytest.raises(Exception, match="link"):
        left.use_path(99, "copy")


def test_the_paths_are_those_of_the_lanes(make_ucx_end: Make, link: Link, request: pytest.FixtureRequest) -> None:
    left, right = make_ucx_end(LEFT), make_ucx_end(RIGHT)
    link(left, right)
    over_tcp = "tcp" in request.node.callspec.id
    assert left.paths(RIGHT) == (["message"] if over_tcp else ["copy", "message"])
    assert left.describe(RIGHT)["path"] == left.paths(RIGHT)[0]
    op = left.write(RIGHT, list(range(NUM_PAGES)) * 20, list(range(NUM_PAGES)) * 20)
    with pytest.raises(Exception, match="open"):
        left.use_path(RIGHT, "message")
    left.wait_done(op)
    left.use_path(RIGHT, "message")
