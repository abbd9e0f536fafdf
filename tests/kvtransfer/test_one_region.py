"""A page of one region, keys and values of every layer, is byte for byte what it was before pages had regions."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.transport import OpDone, PageWrite

WINDOWS = ((0, 1), (1, 3), (3, 4))


def layout(page_size: int = 8, dtype: str = "bfloat16", rank: int = 0, num_ranks: int = 1) -> PoolLayout:
    share = HeadShare(rank, num_ranks, 4) if num_ranks > 1 else None
    return PoolLayout.kv(16, 4, page_size, 4 // num_ranks, 16, dtype, share)


def moved(src: PoolLayout, dst: PoolLayout, num_tokens: int = 40) -> tuple[int, str, str]:
    """Move a prompt by windows of layers; return its digest, and hashes of the pool as it landed and as it is used."""
    network = InprocNetwork()
    sender, receiver = network.transport(1), network.transport(2)
    ours, theirs = sender.allocate_pool(src), receiver.allocate_pool(dst)
    ours.buffer[:] = np.random.default_rng(76).integers(0, 64, len(ours.buffer), dtype=np.uint8).data
    sender.connect(2, receiver.metadata())
    receiver.connect(1, sender.metadata())
    network.deliver_all()
    src_pages = np.arange(-(-num_tokens // src.page_size))[::-1] + 1
    dst_pages = np.arange(-(-num_tokens // dst.page_size)) * 3 % 16
    for layers in WINDOWS:
        sender.write_pages(2, PageWrite(src_pages, dst_pages, layers), b"", Flow(7, with_digest=True))
    network.deliver_all()
    digest = sum(event.digest or 0 for event in sender.poll() if isinstance(event, OpDone)) % 2**64
    landed = sha(theirs.buffer)
    if receiver.lands_in_parts(1):
        receiver.unpack_pages(1, dst_pages)
        network.deliver_all()
    return digest, landed, sha(theirs.buffer)


def sha(data: memoryview) -> str:
    return hashlib.sha1(data).hexdigest()[:16]


EXPECTED: dict[str, tuple[Any, tuple[int, str, str]]] = {
    "equal": ((layout(), layout()), (0x872FD2DB66250092, "a89f6f33d2099f3f", "a89f6f33d2099f3f")),
    "larger pages": ((layout(4), layout(8)), (0x3F8476626C702377, "6aa1be83fb5dd8e1", "6aa1be83fb5dd8e1")),
    "smaller pages": ((layout(16), layout(4)), (0x9B5DB14AD108D5E4, "057cb9307b129c22", "057cb9307b129c22")),
    "narrower": ((layout(), layout(dtype="fp8_e4m3")), (0x4256F6A9B39A52E1, "81f13621abd1c325", "81f13621abd1c325")),
    "wider": (
        (layout(dtype="fp8_e4m3"), layout(dtype="float32")),
        (0xF980B63BCD070EE8, "a1910de7e9d3b3d5", "a1910de7e9d3b3d5"),
    ),
    "one of two ranks to one": (
        (layout(rank=1, num_ranks=2), layout()),
        (0xD83AE45261E66EC9, "baed7e0841f451ce", "a384181bbaed7099"),
    ),
    "one rank to one of two": (
        (layout(), layout(rank=1, num_ranks=2)),
        (0x2871887E7BFFD2CE, "a34eb459b58b104b", "a34eb459b58b104b"),
    ),
    "ranks, pages and type": (
        (layout(4, "float32", 1, 2), layout(8, "fp8_e4m3")),
        (0x8C09E61B596C2DA9, "a1065e278c12b88d", "f60efe1d770438bb"),
    ),
}


@pytest.mark.parametrize(("layouts", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_the_bytes_that_land_and_their_digest_stay(layouts: Any, expected: tuple[int, str, str]) -> None:
    assert moved(*layouts) == expected
