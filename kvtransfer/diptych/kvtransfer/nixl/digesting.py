"""Digests of pages, computed a little at a time: heartbeats do not wait for a long prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.nixl.memory import Memory

TURN_NBYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class Digesting:
    """The digest of pages of ours, as they lie here."""

    operation: int
    pages: list[int]  # still to be added
    digest: int = 0

    def go_on(self, memory: Memory) -> bool:
        """Add some pages; return whether that was all."""
        page_nbytes = memory.pool.layout.page_nbytes
        for _ in range(min(len(self.pages), max(1, TURN_NBYTES // page_nbytes))):
            page = self.pages.pop()
            self.digest = add_digests(
                self.digest, digest_bytes(memory.window(page, 0, page_nbytes), page * page_nbytes)
            )
        return not self.pages
