"""Decides whether pages that somebody else has are fetched, or computed again, and says what that costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from diptych.engine.cache.tier import Tier
from diptych.engine.values.core_report import TierPrice

MANY: Final = 64  # pages, of a load that prices are told by
TOLD_S: Final = 0.1  # that told prices stand while no load begins or ends: they are no news in each step


def worth_loading(load_s: float, compute_s: float) -> bool:
    """Whether to load what would come after `load_s` seconds, with all that is before it in the queue.

    `compute_s`: what it would take to compute the same tokens here. Both are predictions from what was measured;
    infinity stands for "cannot". When in doubt, one computes: that needs nobody else.
    """
    return load_s < compute_s


class TierPrices:
    """What loads from each tier of a cache take, for routers."""

    def __init__(self, tiers: Sequence[Tier], page_size: int) -> None:
        self._tiers = tiers
        self._page_size = page_size
        self._prices: tuple[TierPrice, ...] = ()
        self._until_s = -math.inf  # these stand
        self._num_loads = 0  # that were under way

    def at(self, now_s: float, num_loads: int, compute_s: Callable[[int, int], float]) -> tuple[TierPrice, ...]:
        """Return the price of each tier, in their order, while so many loads are under way.

        `compute_s`: as in `worth_loading`, of tokens of a prompt.
        """
        if self._tiers and (now_s >= self._until_s or num_loads != self._num_loads):
            self._until_s, self._num_loads = now_s + TOLD_S, num_loads
            many_s = compute_s(0, MANY * self._page_size)
            self._prices = tuple([_price(tier, is_computed=many_s > 0) for tier in self._tiers])
        return self._prices


def _price(tier: Tier, *, is_computed: bool) -> TierPrice:
    """Return what is told of a tier. Who does not know how fast it computes prompts loads nothing that takes time."""
    base_s, many_s = tier.restore_s(0), tier.restore_s(MANY)
    if not math.isfinite(many_s) or (not is_computed and tier.load_s(MANY) > 0):
        return TierPrice(tier.name, math.inf)
    return TierPrice(tier.name, _rounded(base_s), _rounded((many_s - base_s) / MANY))


def _rounded(seconds: float) -> float:
    """Return two digits of a time: what differs by less is no news."""
    return float(f"{seconds:.1e}")
