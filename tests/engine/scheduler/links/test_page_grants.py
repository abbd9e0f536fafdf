from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.engine.scheduler.links.posting import PageGrants
from diptych.kvtransfer.inproc import InprocNetwork, InprocTransport
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady

LAYOUT = PoolLayout.kv(num_pages=8, num_layers=1, page_size=4, num_kv_heads=1, head_dim=4, dtype="float32")
PEER, OTHER, ROOM = 2, 3, 5
HAND_OFF = HandOff(ROOM, first_token=7, finish=None, num_pages=2, generations=(1, 1), cached_tokens=0)


def ready(room: int, *pages: int) -> PagesReady:
    return PagesReady(room, pages, (1,) * len(pages), 0, 4 * len(pages), 4, 0)


@pytest.fixture
def transport() -> Iterator[InprocTransport]:
    opened = InprocNetwork().transport(1, only_granted=True)
    opened.allocate_pool(LAYOUT)
    yield opened
    opened.close()


def writable(transport: InprocTransport, peer: int) -> list[int]:
    return [page for page in range(LAYOUT.num_pages) if transport.may_write(peer, page)]


@pytest.mark.parametrize(
    "last_word", [HAND_OFF, Abort(ROOM, 1, "no"), AbortAck(ROOM)], ids=lambda note: type(note).__name__
)
def test_pages_are_open_from_their_grant_to_the_peers_last_word(transport: InprocTransport, last_word: Note) -> None:
    grants = PageGrants(transport, transport)
    assert writable(transport, PEER) == []
    grants.note_leaves(PEER, ready(ROOM, 3, 4))
    grants.note_leaves(PEER, ready(6, 5))
    assert writable(transport, PEER) == [3, 4, 5]
    assert writable(transport, OTHER) == []
    grants.note_arrived(OTHER, last_word)  # of another peer's rooms it has no say
    grants.note_arrived(PEER, Ack(ROOM))
    assert writable(transport, PEER) == [3, 4, 5]
    grants.note_arrived(PEER, last_word)
    assert writable(transport, PEER) == [5]


def test_our_own_abort_closes_nothing_yet(transport: InprocTransport) -> None:
    grants = PageGrants(transport, transport)
    grants.note_leaves(PEER, ready(ROOM, 3, 4))
    grants.note_leaves(PEER, Abort(ROOM, 1, "gave up"))
    assert writable(transport, PEER) == [3, 4]


def test_a_grant_ends_with_its_link_or_when_its_note_could_not_leave(transport: InprocTransport) -> None:
    grants = PageGrants(transport, transport)
    grants.note_leaves(PEER, ready(ROOM, 3, 4))
    grants.note_leaves(PEER, ready(6, 5))
    grants.note_leaves(OTHER, ready(7, 6))
    grants.end(PEER, 6)
    assert writable(transport, PEER) == [3, 4]
    grants.link_down(PEER)
    assert writable(transport, PEER) == []
    assert writable(transport, OTHER) == [6]
