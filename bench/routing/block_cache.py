"""The prefix cache of a simulated worker: blocks in the order of their last use, the oldest evicted first.

A prompt's blocks are touched from the last to the first, so a block never goes before those that follow it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt are here."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))

    def put(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Use a prompt's blocks; return those that are new here and those evicted for them."""
        stored = [block for block in blocks if block not in self._blocks]
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        too_many = max(0, len(self._blocks) - self._num_blocks)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(too_many)]
        return stored, removed
