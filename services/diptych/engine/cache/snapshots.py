"""States of recurrent layers in pages: where others can begin whose text begins alike, and what is handed over. Pure.

A request that runs has its state in a slot of its own, which has the number of its row. A *snapshot* is a copy of it
in pages of the pool, after an exact number of tokens. So a state is owned, granted, sent, verified and evicted as any
pages are.

Which are made is decided at admission (as Marconi does, arXiv 2411.19379): one behind the last whole page before the
prompt's end, where a conversation goes on; and one where the prompt leaves a text that is cached without a state, since
then at least two requests have that text. Snapshots have a share of the pool at most; the one that was wanted longest
ago gives way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.engine.values.request import Request

SHARE: Final = 10  # of the pool, that snapshots have in the tree, is one in so many


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What states cost a KV cache."""

    pages_each: int  # 0: no layer is recurrent
    max_kept: int  # in the tree

    @staticmethod
    def of(pages_each: int, num_pages: int) -> Snapshots:
        return Snapshots(pages_each, max(1, num_pages // SHARE // pages_each) if pages_each else 0)

    def __bool__(self) -> bool:
        return self.pages_each > 0

    def pages_for(self, request: Request) -> int:
        """Return how many pages of its own a request needs for the state that a peer writes or reads."""
        return self.pages_each if request.state_len else 0


def cuts(request: Request, begun: int, known: int, page_size: int) -> tuple[int, ...]:
    """Return after how many tokens to make snapshots, ascending.

    The request begins with a state after `begun` tokens, where the text of its first `known` is cached. Both are
    multiples of the page size.
    """
    last = (request.num_tokens - 1) // page_size * page_size
    return tuple(sorted({end for end in (known, last) if begun < end <= last}))
