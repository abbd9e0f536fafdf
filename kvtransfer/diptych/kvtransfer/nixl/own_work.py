"""What is done with pages of ours beside transfers, a little at a time: heartbeats do not wait for a long prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.kernels.page_pack import unpack_page
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.layout import DTYPE_NBYTES
from diptych.kvtransfer.nixl.memory import Memory

TURN_NBYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class OwnWork:
    """The digest of pages as they lie here, or putting together the parts that landed in them."""

    operation: int
    pages: list[int]  # still to be done
    part_heads: tuple[int, ...] = ()  # none: a digest
    digest: int | None = None

    def __post_init__(self) -> None:
        self.digest = None if self.part_heads else 0

    def go_on(self, memory: Memory) -> bool:
        """Do some pages; return whether that was all."""
        for _ in range(min(len(self.pages), max(1, TURN_NBYTES // memory.region.stride))):
            self._do(memory, self.pages.pop())
        return not self.pages

    def _do(self, memory: Memory, page: int) -> None:
        if self.digest is not None:
            found = digest_bytes(memory.region.rows[page], page * memory.region.stride)
            self.digest = add_digests(self.digest, found)
            return
        layout = memory.pool.layout
        head_nbytes = layout.head_dim * DTYPE_NBYTES[layout.dtype]
        sizes = {"num_layers": layout.num_layers, "page_size": layout.page_size, "head_nbytes": head_nbytes}
        unpack_page(memory.region.rows[page], self.part_heads, **sizes)
