"""Pools in device memory, driven over the emulation: which paths there are, and that each does what the others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.kernels.image import KernelImage, TransferKernels
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import DevicePool
from diptych.kvtransfer.transport import NoteReceived, OpDone

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

LEFT, RIGHT = 1, 2
KERNEL = KernelImage(b"", "none", 4, 0, 64)
KERNELS = TransferKernels(KERNEL, KERNEL)


def layout(head_dim: int = 64) -> PoolLayout:
    return PoolLayout.kv(num_pages=8, num_layers=4, page_size=16, num_kv_heads=2, head_dim=head_dim, dtype="bfloat16")


@pytest.fixture(params=["emulated-mover", "emulated-staged"])
def ends(request: pytest.FixtureRequest, make_child_end: Make, link: Link) -> tuple[Any, Any]:
    left, right = (make_child_end(request.param, instance) for instance in (LEFT, RIGHT))
    link(left, right)
    left.fill(1)
    right.fill(2)
    return left, right


def test_a_pool_on_a_device_is_reached_by_the_mover_and_by_staging(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    assert left.paths(RIGHT) == ["mover", "staged"]
    assert left.describe(RIGHT)["path"] == left.path


def test_a_path_for_host_memory_is_refused(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    with pytest.raises(Exception, match="no path 'copy'"):
        left.use_path(RIGHT, "copy")


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_the_digest_of_what_was_written_is_that_of_what_has_landed(
    ends: tuple[Any, Any], layers: tuple[int, int] | None
) -> None:
    left, right = ends
    src, dst = [3, 9, 27], [50, 1, 2]
    left.write(RIGHT, src, dst, layers=(0, 4), stream=7, with_digest=True)
    first = left.write(RIGHT, src, dst, b"all", layers=layers, stream=8, with_digest=True)
    op = left.write(RIGHT, src, dst, b"again", stream=7)
    for data in (b"all", b"again"):
        right.wait(lambda event, data=data: isinstance(event, NoteReceived) and event.data == data)
    done = left.wait_done(first)
    left.wait_done(op)
    notes = {event.data: event.digest for event in right.events if isinstance(event, NoteReceived)}
    assert notes[b"all"] == done.digest
    landed = right.wait_done(right.digest_pages(dst)).digest
    assert landed == notes[b"again"]
    assert (notes[b"all"] == landed) == (layers is None)


def test_what_follows_a_stream_of_the_program_is_done_once_that_is(ends: tuple[Any, Any]) -> None:
    left, right = ends
    for number in range(100):  # more than there are events to wait for
        left.ask("order_after", stream=0)
        left.write(RIGHT, [number % 64], [63 - number % 64], b"%d" % number, stream=number + 1)
    right.wait(lambda event: sum(isinstance(event, NoteReceived) for event in right.events) == 100)
    assert left.wait_done(left.digest_pages([5])).error is None
    assert right.digest(list(range(63, -1, -1))) == left.digest(list(range(64)))


def test_what_reads_pages_waits_for_the_stream_that_the_device_names() -> None:
    streams: list[int] = []
    for stream in (None, lambda: 7):
        device = Device("emulated", stream=stream)
        DevicePool(layout(), device, 0, streams.append, lambda *_: None).order_after_kernels()
    assert streams == [7]


def test_ten_thousand_pages_are_digested_in_more_than_one_go(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    one = left.wait_done(left.digest_pages([5])).digest
    op = left.digest_pages([5] * 10_000)
    assert left.wait_done(op) == OpDone(op, None, one * 10_000 % 2**64)


def test_a_host_pool_and_a_device_pool_reach_each_other(make_child_end: Make, link: Link) -> None:
    host, device = make_child_end("tcp", LEFT), make_child_end("emulated-staged", RIGHT)
    link(host, device)
    assert host.paths(RIGHT) == ["message"]
    host.fill(1)
    device.fill(2)
    op = host.write(RIGHT, [1, 2], [3, 4], b"to the device")
    device.wait_note()
    host.wait_done(op)
    assert device.digest([3, 4]) == host.digest([1, 2])
    device.write(LEFT, [5, 6], [7, 8], b"to the host")
    host.wait_note()
    assert host.digest([7, 8]) == device.digest([5, 6])


def test_layers_that_kernels_cannot_copy_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 128 bytes, not 64"):
        Device("emulated").validate(PoolLayout.kv(8, 4, 1, 2, 8, "bfloat16"))
    Device("emulated").validate(layout())


def test_a_cuda_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernels"):
        Device("cuda").validate(layout())
    Device("cuda", kernels=KERNELS).validate(layout())
