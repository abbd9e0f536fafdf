"""Whose grammar is checked next. Pure: it is told the time.

Rules: tenants take turns, whoever came first among them; one check a tenant at a time; what a tenant's checks took is
its debt, which it pays back by the second, and who owes too much is turned away until then. Short checks are free.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

MANY_DEBTORS: Final = 1024  # more are forgiven, those that owe least


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much a queue takes, and how much of the time one tenant gets."""

    max_waiting: int  # in all
    max_tenant_waiting: int
    free_s: float  # of each check
    max_debt_s: float  # beyond it a tenant is turned away
    payback: float  # seconds of debt that a second pays for: a tenant's share in the long run


@dataclass(frozen=True, slots=True)
class Refused:
    """No place in the queue."""

    is_tenants: bool  # the tenant has asked for too much; else all have
    retry_after_s: float


class CheckQueue:
    """Numbers checks as they come. Each is taken and then finished, or dropped or turned away while it waits."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lines: OrderedDict[str, deque[int]] = OrderedDict()  # by tenant, in the order of turns; never empty
        self._tenants: dict[int, str] = {}  # of all checks
        self._running: set[str] = set()
        self._debts: dict[str, tuple[float, float]] = {}  # by tenant: how much, and when
        self._next_number = 0
        self.num_waiting = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def offer(self, tenant: str, now_s: float) -> int | Refused:
        """Take a check; return its number."""
        wait_s = self._wait_s(tenant, now_s)
        if wait_s > 0:
            return Refused(True, wait_s)
        line = self._lines.get(tenant, ())
        if len(line) >= self._limits.max_tenant_waiting or self.num_waiting >= self._limits.max_waiting:
            return Refused(len(line) >= self._limits.max_tenant_waiting, 1.0)
        number = self._next_number
        self._next_number += 1
        self._lines.setdefault(tenant, deque()).append(number)
        self._tenants[number] = tenant
        self.num_waiting += 1
        return number

    def pop(self) -> int | None:
        """Return the check to begin now; None: there is none."""
        tenant = next((tenant for tenant in self._lines if tenant not in self._running), None)
        if tenant is None:
            return None
        number = self._lines[tenant].popleft()
        self._lines.move_to_end(tenant)
        self._forget_empty(tenant)
        self._running.add(tenant)
        self.num_waiting -= 1
        return number

    def drop(self, number: int) -> None:
        """A check that waits is not wanted any more."""
        tenant = self._tenants.pop(number)
        self._lines[tenant].remove(number)
        self._forget_empty(tenant)
        self.num_waiting -= 1

    def finish(self, number: int, took_s: float, now_s: float) -> tuple[Sequence[int], float]:
        """A check has ended. Return those that are turned away because their tenant owes too much, and for how long."""
        tenant = self._tenants.pop(number)
        self._running.remove(tenant)
        self.charge(tenant, max(0.0, took_s - self._limits.free_s), now_s)
        wait_s = self._wait_s(tenant, now_s)
        if wait_s <= 0:
            return (), 0.0
        turned_away = tuple(self._lines.get(tenant, ()))
        for waiting in turned_away:
            self.drop(waiting)
        return turned_away, wait_s

    def charge(self, tenant: str, cost_s: float, now_s: float) -> None:
        """Let a tenant owe more: for a check, or for what came of it."""
        owed_s = self._owed_s(tenant, now_s) + cost_s
        self._debts.pop(tenant, None)
        if owed_s > 0:
            self._debts[tenant] = (owed_s, now_s)
        if len(self._debts) > MANY_DEBTORS:
            debts = {name: (self._owed_s(name, now_s), now_s) for name in self._debts}
            self._debts = dict(nlargest(MANY_DEBTORS // 2, debts.items(), key=lambda debt: debt[1][0]))

    def owes_too_much(self, tenant: str, now_s: float) -> bool:
        return self._wait_s(tenant, now_s) > 0

    def _forget_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]

    def _owed_s(self, tenant: str, now_s: float) -> float:
        owed_s, at_s = self._debts.get(tenant, (0.0, now_s))
        return max(0.0, owed_s - (now_s - at_s) * self._limits.payback)

    def _wait_s(self, tenant: str, now_s: float) -> float:
        """How long it takes until the tenant owes no more than it may."""
        return max(0.0, self._owed_s(tenant, now_s) - self._limits.max_debt_s) / self._limits.payback
