"""Whatever bytes a peer sends: they are understood or refused with the error that says so, and cost little."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator

import pytest
from fuzzing import FLOATS, I32, U32, U64, fuzz, malformed
from hypothesis import given
from hypothesis import strategies as st

from diptych.kvtransfer import metadata, note_codec
from diptych.kvtransfer.conversation import Conversation, Frame, Kind, decode_frame, encode_frame
from diptych.kvtransfer.errors import LayoutMismatch, MalformedMetadata, MalformedNote
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.notes import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Ack,
    HandedGroup,
    HandOff,
    Note,
    Offer,
    OfferEnded,
    PagesReady,
    Pull,
    Pulled,
    StopPull,
)
from diptych.kvtransfer.plan import Conversion
from diptych.kvtransfer.pool import MAX_PROBE_PAGES
from diptych.kvtransfer.probe import notes as probe_notes
from diptych.kvtransfer.probe.notes import Directions, ProbeAsk, ProbeCheck, ProbeEnd, ProbeFound, ProbeNote, ProbeOffer
from diptych.kvtransfer.process import ProcessIdentity
from diptych.v1 import bootstrap_pb2, transfer_pb2, worker_pb2

PEER, OWN, ROOM = 0xFFFF_0000_0000_0001, 2, 5
KEY = b"sixteen bytes ok"
LAYOUT = PoolLayout.kv(num_pages=64, num_layers=2, page_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
MAX_GROWTH = 1 << 20  # bytes

NOTES: list[Note] = [
    PagesReady(ROOM, (3, 4), (1, 9), 16, 40, 16, 2**64 - 1),
    HandOff(
        ROOM, 7, "stop", 2, (1, 9), 16, (HandedGroup("tokens", 16, 40, 1), HandedGroup("window", 32, 40, 1)), b"\1\0"
    ),
    Ack(ROOM),
    Abort(ROOM, worker_pb2.ERROR_CODE_DEADLINE, "too late"),
    AbortAck(ROOM),
    Pull(ROOM, "kv", b"salt", bytes(8 * 32), 16, 16, (3,), (1,), 0.5),
    Pulled(ROOM, 1, (1,), "busy"),
    StopPull(ROOM),
    Offer(ROOM, "kv", b"salt", bytes(8 * 32), 16, 2.5, 3, 1.0),
    OfferEnded(ROOM, "taken", 2),
]
PROBE_NOTES: list[ProbeNote] = [
    Directions(True, False),
    ProbeAsk(),
    ProbeOffer((64, 65), 16),
    ProbeCheck(),
    ProbeFound(2**64 - 1),
    ProbeEnd("copy", 1e9, ""),
]
METADATA = metadata.EngineMetadata(
    process=ProcessIdentity("boot", "pid:[1]", 1234, 5678),
    layout=LAYOUT,
    pool_base=0x7F00_0000_0000,
    pool_key=b"key",
    worker_address=b"address",
    library="UCX 1.22.0",
    link_key=KEY,
)


@contextlib.contextmanager
def costing_little() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_GROWTH
    finally:
        tracemalloc.stop()


@fuzz
@given(data=malformed(*(note_codec.encode(note, sender=PEER, target=OWN) for note in NOTES)))
def test_notes(data: bytes) -> None:
    with contextlib.suppress(MalformedNote):
        note = note_codec.decode(data, sender=PEER, target=OWN)
        assert note.room != 0
        again = note_codec.encode(note, sender=PEER, target=OWN)
        assert note_codec.decode(again, sender=PEER, target=OWN) == note


@fuzz
@given(code=I32)
def test_an_abort_for_a_reason_that_we_do_not_know_is_an_abort(code: int) -> None:
    """It must not be dropped: pages wait for it."""
    wire = transfer_pb2.TransferNote(version=PROTOCOL_VERSION, sender=PEER, target=OWN, room=ROOM)
    wire.abort.reason.code = code  # type: ignore[assignment]
    note = note_codec.decode(wire.SerializeToString(), sender=PEER, target=OWN)
    known = code in worker_pb2.ErrorCode.values() and code != 0
    assert note == Abort(ROOM, code if known else worker_pb2.ERROR_CODE_ABORTED, "")


@fuzz
@given(data=malformed(*(probe_notes.encode(note, sender=PEER, target=OWN) for note in PROBE_NOTES)))
def test_notes_of_link_tests(data: bytes) -> None:
    with contextlib.suppress(MalformedNote):
        note = probe_notes.decode(data, sender=PEER, target=OWN)
        if isinstance(note, ProbeOffer):
            assert len(note.pages) <= MAX_PROBE_PAGES


@pytest.mark.parametrize(
    "offer", [ProbeOffer((1,) * (MAX_PROBE_PAGES + 1), 16), ProbeOffer((1,), 2**32 - 1), ProbeOffer((1, 1), 16)]
)
def test_an_offer_that_would_have_us_write_without_end_is_refused(offer: ProbeOffer) -> None:
    data = probe_notes.encode(offer, sender=PEER, target=OWN)
    with pytest.raises(MalformedNote, match="offer"):
        probe_notes.decode(data, sender=PEER, target=OWN)


@fuzz
@given(data=malformed(metadata.encode(METADATA)))
def test_metadata(data: bytes) -> None:
    with costing_little(), contextlib.suppress(MalformedMetadata, LayoutMismatch):
        found = metadata.decode(data, like=LAYOUT)
        Conversion.between(LAYOUT, found.layout)
    with contextlib.suppress(MalformedMetadata):
        metadata.decode_layout(data)


@fuzz
@given(
    sizes=st.tuples(U32, U32, U32, U32, U32, U32, U32),
    layers=st.none() | st.lists(U32, max_size=4),
    dtype=st.sampled_from(("bfloat16", "float32", "fp8_e4m3", "", "nan")),
    num_regions=st.integers(0, 3),
    keep=st.sets(st.integers(0, 6)),
)
def test_layouts(
    sizes: tuple[int, ...], layers: list[int] | None, dtype: str, num_regions: int, keep: set[int]
) -> None:
    """Some sizes are ours, so that the rest is looked at, too."""
    region = LAYOUT.sole_region
    ours = (LAYOUT.num_pages, LAYOUT.page_size, 0, 1, region.num_heads, region.head_dim, region.total_heads)
    chosen = [ours[i] if i in keep else sizes[i] for i in range(7)]
    wire = transfer_pb2.EngineMetadata.FromString(metadata.encode(METADATA))
    num_pages, page_size, rank, num_ranks, *of_region = chosen
    wire.layout.CopyFrom(
        bootstrap_pb2.KvLayout(num_pages=num_pages, page_size=page_size, rank=rank, num_ranks=num_ranks)
    )
    for _ in range(num_regions):
        added = wire.layout.regions.add(layers=region.layers if layers is None else layers, num_planes=2, dtype=dtype)
        added.num_heads, added.head_dim, added.total_heads = of_region
        added.reach = region.reach
    with costing_little(), contextlib.suppress(MalformedMetadata, LayoutMismatch):
        found = metadata.decode(wire.SerializeToString(), like=LAYOUT)
        assert found.layout.page_nbytes <= metadata.MAX_PAGE_NBYTES
        for one, other in ((LAYOUT, found.layout), (found.layout, LAYOUT)):
            Conversion.between(one, other)


def frames() -> st.SearchStrategy[Frame]:
    number = st.integers(0, 6) | U64
    return st.builds(
        Frame,
        kind=st.sampled_from(Kind),
        source=st.just(PEER),
        target=st.just(OWN),
        session=number,
        peer_session=st.sampled_from((0, 9)) | U64,
        number=number,
        consumed=number,
        window=U64,
        sent_ns=U64,
        echo_ns=U64,
        digest=st.none() | U64,
        data=st.binary(max_size=10),
    )


@fuzz
@given(data=malformed(encode_frame(Frame(Kind.NOTE, PEER, OWN, 3, 9, 1, 2, 3, 4, 5, digest=6, data=b"note"), KEY)))
def test_frames(data: bytes) -> None:
    with contextlib.suppress(MalformedNote):
        frame = decode_frame(data)
        assert decode_frame(encode_frame(frame, KEY)) == frame


@fuzz
@given(heard=st.lists(frames(), max_size=20))
def test_a_peer_that_says_anything_in_any_order(heard: list[Frame]) -> None:
    talk = Conversation(OWN, PEER, 9, former_session=2, window=4, now_ns=1)
    for now_ns, frame in enumerate(heard):
        talk.receive(frame, now_ns)
        talk.beat(now_ns)
        assert talk.num_early <= 4 + 1


@fuzz
@given(bytes_per_s=FLOATS)
def test_a_verdict_with_any_speed(bytes_per_s: float) -> None:
    note = probe_notes.decode(
        probe_notes.encode(ProbeEnd("copy", bytes_per_s), sender=PEER, target=OWN), sender=PEER, target=OWN
    )
    assert isinstance(note, ProbeEnd)
    assert 0 <= note.bytes_per_s < float("inf")
