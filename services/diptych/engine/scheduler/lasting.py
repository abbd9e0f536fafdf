"""The tiers of a scheduler that outlive it: files, and a store that workers share. `lasting_opened` opens them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.engine.values.events import PagesRestored

if TYPE_CHECKING:  # most schedulers have none
    from diptych.engine.tiers.file_tier import FileTier
    from diptych.engine.tiers.lasting_tier import LastingTier
    from diptych.engine.tiers.shared_tier import SharedTier


@dataclass(frozen=True, slots=True)
class LastingTiers:
    """`close` them before the pool goes."""

    files: FileTier | None = None
    shared: SharedTier | None = None  # below

    @property
    def _all(self) -> Sequence[LastingTier]:
        return [tier for tier in (self.files, self.shared) if tier is not None]

    def restored(self) -> Sequence[PagesRestored]:
        """Return which restores have ended since the last call, and how."""
        return [each for tier in self._all for each in tier.restored()] if self.files or self.shared else ()

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when one of them has something to say."""
        return [each for tier in self._all for each in tier.descriptors()]

    def close(self) -> None:
        for tier in self._all:
            tier.close()


NO_LASTING_TIERS: Final = LastingTiers()
