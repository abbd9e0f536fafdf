"""Requests that wait, in a line for each tenant, in order of rank; a policy chooses from the first of one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from diptych.engine.values.request import Request

WINDOW: Final = 64  # how many of a tenant's requests, in order of rank, a policy may choose from

Place = tuple[float, int, Request]  # rank, order of arrival
_request_of: Final[Callable[[Place], Request]] = itemgetter(2)


class TenantLines:
    """Requests by tenant, in order of rank."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, list[Place]] = {}  # no list is empty

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self.by_tenant

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_tenant)

    def add(self, place: Place) -> None:
        insort(self.by_tenant.setdefault(place[2].account.tenant, []), place)

    def remove(self, place: Place) -> None:
        tenant = place[2].account.tenant
        line = self.by_tenant[tenant]
        del line[bisect_left(line, place)]
        if not line:
            del self.by_tenant[tenant]

    def first(self, tenant: str) -> list[Request]:
        """Return those of a tenant that a policy may choose from."""
        return [*map(_request_of, self.by_tenant[tenant][:WINDOW])]
