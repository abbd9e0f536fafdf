"""The ranks of a scheduler that are on other nodes, as the frontend of rank 0 sees them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from diptych.common.errors import InternalError
from diptych.v1.rank_pb2 import RankDoors


class GroupEnded(InternalError):
    """The group is over, and no part of it may go on."""


class Company(Protocol):
    """The ranks of a scheduler that are on other nodes."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """Ends when one of them is gone, with words."""
        ...

    async def last_words(self, timeout_s: float) -> str:
        """Say who of them is gone, or goes until then, now that a rank here has ended; empty: nobody."""
        ...

    def absence(self) -> str:
        """Say who elsewhere may keep the others waiting; empty: nobody."""
        ...

    def open(self, doors: RankDoors) -> None:
        """Rank 0 listens there."""
        ...

    def loaded(self) -> None:
        """All ranks have their part of the model."""
        ...

    def stop(self) -> None:
        """The group ends because it was told to."""
        ...

    def died(self, words: str) -> None:
        """The group ends, and why."""
        ...


class Alone:
    """Implements `Company` where all ranks are on one node."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def last_words(self, timeout_s: float) -> str:
        return ""

    def absence(self) -> str:
        return ""

    def open(self, doors: RankDoors) -> None:
        pass

    def loaded(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def died(self, words: str) -> None:
        pass
