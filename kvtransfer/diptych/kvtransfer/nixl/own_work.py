"""What is done with pages of ours beside transfers, a little at a time: heartbeats do not wait for a long prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.nixl.memory import Memory
from diptych.kvtransfer.plan import Parts

TURN_NBYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class OwnWork:
    """The digest of pages as they lie here, or putting together the parts that landed in them."""

    operation: int
    pages: list[int]  # still to be done
    parts: tuple[Parts, ...] | None = None  # None: a digest
    digest: int | None = None

    def __post_init__(self) -> None:
        self.digest = 0 if self.parts is None else None

    def go_on(self, memory: Memory) -> bool:
        """Do some pages; return whether that was all."""
        for _ in range(min(len(self.pages), max(1, TURN_NBYTES // memory.registered.stride))):
            self._do(memory, self.pages.pop())
        return not self.pages

    def _do(self, memory: Memory, page: int) -> None:
        if self.digest is not None:
            found = digest_bytes(memory.registered.rows[page], page * memory.registered.stride)
            self.digest = add_digests(self.digest, found)
            return
        for parts in self.parts or ():
            parts.unpack(memory.registered.rows[page])
