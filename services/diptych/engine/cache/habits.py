"""How often the requests of a tenant call a tool, and so go on: learned from those that ended of late. Pure.

A tenant of which nothing is known has no sessions. Bounded: `MAX_TENANTS`, of which the one goes that ended nothing for
longest.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MEMORY: Final = 200  # requests after which one counts a third
MAX_TENANTS: Final = 512


@dataclass(slots=True)
class _Habit:
    share: float = 0.0
    num: float = 0.0  # requests that it is of


class Habits:
    """The shares of requests that called a tool, by tenant."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Habit] = OrderedDict()  # who ended something last, last

    def __len__(self) -> int:
        return len(self._tenants)

    def ended(self, tenant: str) -> None:
        """A request has ended; whether it called a tool is said behind it."""
        habit = self._tenants.setdefault(tenant, _Habit())
        self._tenants.move_to_end(tenant)
        habit.num = min(habit.num + 1.0, MEMORY)
        habit.share -= habit.share / habit.num
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def called(self, tenant: str) -> None:
        """One that has ended called a tool."""
        if (habit := self._tenants.get(tenant)) is not None:
            habit.share = min(1.0, habit.share + 1.0 / habit.num)

    def share(self, tenant: str) -> float:
        """Return how likely a request of a tenant is to call a tool."""
        habit = self._tenants.get(tenant)
        return 0.0 if habit is None else habit.share
