"""Tells the transfer engine which pages of ours a peer may write: from our `PagesReady` to its last word on the room.

A peer's `HandOff`, `Abort` and `AbortAck` all say that no write will come any more; the end of its link does, too.
"""

from __future__ import annotations

import numpy as np

from diptych.kvtransfer.notes import Abort, AbortAck, HandOff, Note, PagesReady
from diptych.kvtransfer.transport import InstanceId, PageIndices, TransportLinks, TransportMemory


class PageGrants:
    """Follows the notes of all rooms; idle for workers whose peers write no pages."""

    def __init__(self, links: TransportLinks, memory: TransportMemory) -> None:
        self._links = links
        self._memory = memory
        self._granted: dict[InstanceId, dict[int, PageIndices]] = {}  # by room

    def note_leaves(self, peer: InstanceId, note: Note) -> None:
        """Call before it does: the peer may answer at once."""
        if isinstance(note, PagesReady):
            pages = np.array(note.pages, dtype=np.int64)
            self._links.grant_pages(peer, pages)
            self._granted.setdefault(peer, {})[note.room] = pages

    def note_arrived(self, peer: InstanceId, note: Note) -> None:
        if isinstance(note, HandOff | Abort | AbortAck):
            self.end(peer, note.room)

    def end(self, peer: InstanceId, room: int) -> None:
        """The peer writes no more pages of the room, or never heard of them."""
        pages = self._granted.get(peer, {}).pop(room, None)
        if pages is not None:
            self._memory.revoke_pages(pages)

    def link_down(self, peer: InstanceId) -> None:
        for pages in self._granted.pop(peer, {}).values():
            self._memory.revoke_pages(pages)
