"""The tier of a store that workers share, below files: pages that others have computed, and that outlive them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from diptych.common.arrays import U64
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import Lookup
from diptych.engine.tiers.doorkeeper import Doorkeeper
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.medium import Medium
from diptych.engine.tiers.object_asker import AskCounts
from diptych.kvtransfer.ownership import Pages

MOST_NAMES: Final = 2**18  # of pages that were turned away, which are remembered


class RunMedium(Medium, Protocol):
    """Keeps runs of pages, and must be asked which: see `Store`."""

    @property
    def run_pages(self) -> int: ...

    @property
    def asked(self) -> AskCounts: ...

    @property
    def look_up_s(self) -> float: ...

    @property
    def takes_pages(self) -> bool: ...

    def look_up(
        self, first: int, ids: Sequence[PageId], until_s: float, before: Sequence[PageId] = ()
    ) -> Lookup | None: ...

    def forget_runs(self, ids: Sequence[PageId], ends: Sequence[PageId]) -> Any: ...

    def lacks(self, group: int, name: int) -> bool: ...

    def offer(self, pages: Pages, ids: Sequence[PageId]) -> bool: ...


class SharedTier(LastingTier):
    """Implements `Store` over `PageObjects`, of one rank or of several."""

    name = "shared"

    def __init__(self, objects: RunMedium) -> None:
        super().__init__(objects)
        self._objects = objects
        self._doorkeeper = Doorkeeper(MOST_NAMES)
        self.run_pages = objects.run_pages

    @property
    def asked(self) -> AskCounts:
        return self._objects.asked

    @property
    def look_up_s(self) -> float:
        return self._objects.look_up_s

    def look_up(
        self, first: int, ids: Sequence[PageId], until_s: float, before: Sequence[PageId] = ()
    ) -> Lookup | None:
        return self._objects.look_up(first, ids, until_s, before)

    def forget_runs(self, ids: Sequence[PageId], ends: Sequence[PageId]) -> None:
        self._objects.forget_runs(ids, ends)

    @property
    def takes_pages(self) -> bool:
        return self._objects.takes_pages

    def takes(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return self._doorkeeper.admits(names, num_uses, num_tokens)

    def lacks(self, group: int, name: int) -> bool:
        return self._objects.lacks(group, name)

    def offer(self, pages: Pages, ids: Sequence[PageId]) -> None:
        self._objects.offer(pages, ids)

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return False  # it is given texts while they are in the pool
