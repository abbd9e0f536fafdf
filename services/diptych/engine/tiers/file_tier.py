"""The tier of local files: pages that survive the process, below the KV pool or host memory."""

from __future__ import annotations

from typing import Final

from diptych.common.arrays import U64
from diptych.engine.tiers.doorkeeper import Doorkeeper
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.medium import Medium

MOST_NAMES: Final = 2**20  # of pages that were turned away, which are remembered


class FileTier(LastingTier):
    """Implements `Tier` over `PageFiles`, of one rank or of several."""

    name = "files"

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self._doorkeeper = Doorkeeper(min(MOST_NAMES, 2 * self.capacity))

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return self._doorkeeper.admits(names, num_uses, num_tokens)
