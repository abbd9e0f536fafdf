"""Whose turn it is: each tenant gets its weight's share of the worker, however many requests it sends.

`TenantShares` keeps virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a
tenant is charged for the tokens computed for it, divided by its weight, and the waiting tenant charged least goes next.
Who comes back after a pause starts where the others are: time in which nothing was asked earns no credit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest
from operator import itemgetter
from typing import Final

OUTPUT_COST: Final = 2  # of an output token, in prompt tokens
MANY_TENANTS: Final = 1024


class TenantShares:
    """The charges of tenants. A tenant that is not in `weights` has weight 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._charged: dict[str, float] = {}  # no entry: as much as `_turn`; bounded
        self._turn = 0.0  # what the tenant chosen last was charged; never falls

    def __len__(self) -> int:
        """How many tenants are remembered."""
        return len(self._charged)

    def enter(self, tenant: str) -> None:
        """Note that `tenant`, of which nothing waited, has a waiting request."""
        if len(self._charged) >= MANY_TENANTS:
            most = nlargest(MANY_TENANTS // 2, self._charged.items(), key=itemgetter(1))
            self._charged = dict(most)  # the others owe least, mostly nothing
        self._charged[tenant] = max(self._charged_to(tenant), self._turn)

    def next(self, waiting: Iterable[str]) -> str:
        """Return whose turn it is among the tenants that wait, at least one."""
        tenant = min(waiting, key=self._charged_to)
        self._turn = max(self._turn, self._charged_to(tenant))
        return tenant

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Take note of tokens computed, or to be computed, for `tenant`; negative ones give back."""
        cost = prompt_tokens + OUTPUT_COST * output_tokens
        self._charged[tenant] = self._charged.get(tenant, self._turn) + cost / self._weights.get(tenant, 1.0)

    def _charged_to(self, tenant: str) -> float:
        return self._charged.get(tenant, self._turn)
