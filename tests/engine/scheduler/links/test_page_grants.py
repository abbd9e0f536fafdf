from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from diptych.engine.scheduler.links.posting import PageGrants, Posting
from diptych.engine.values.events import SendNote, StreamPages
from diptych.kvtransfer.errors import TransferQueueFull
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.inproc import InprocNetwork, InprocTransport, network
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady
from diptych.kvtransfer.transport import PageWrite

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


class FullTransport(InprocTransport):
    """It has no room at first."""

    is_full = True

    def send_note(self, peer: int, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        if self.is_full:
            raise TransferQueueFull("full")
        return 1


def test_no_page_is_granted_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant waits for other ranks, which wait for this one in a step."""
    monkeypatch.setattr(network, "InprocTransport", FullTransport)
    transport = network.InprocNetwork().transport(1, only_granted=True)
    assert isinstance(transport, FullTransport)
    transport.allocate_pool(LAYOUT)
    posting = Posting(transport, PageGrants(transport, transport), [(0, 1)], [])
    posting.perform(SendNote(PEER, ready(ROOM, 3)))
    posting.perform(StreamPages(6, PEER, PageWrite(np.array([1]), np.array([2])), Flow(6)))
    transport.revoke_pages(np.array([3]))
    follow, transport.is_full = posting.layer_listener(), False
    assert follow is not None
    follow(0)
    assert (writable(transport, PEER), len(posting.queue)) == ([], 2)
    posting.post()
    assert (writable(transport, PEER), len(posting.queue)) == ([3], 0)
