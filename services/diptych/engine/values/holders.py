"""Who claims pages of a KV pool: what the books of a cache are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.values.request import Request
from diptych.kvtransfer.ownership import Pages


@dataclass(frozen=True, slots=True)
class Holders:
    """Those of one scheduler core, or of several that share a cache."""

    owning: Sequence[Request] = ()  # their pages are theirs
    importing: Sequence[Request] = ()  # peers write their pages
    quarantined: Sequence[Pages] = ()  # of rooms that have ended, while peers may write them

    def __add__(self, other: Holders) -> Holders:
        return Holders(
            [*self.owning, *other.owning],
            [*self.importing, *other.importing],
            [*self.quarantined, *other.quarantined],
        )
