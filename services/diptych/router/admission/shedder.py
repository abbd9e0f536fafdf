"""Refuses requests of sheddable tiers while others would not be served well. `shed` says how many, this one which.

Rule: where nothing is in flight a request always passes: an estimate that keeps all others out would never be mended.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Final

from diptych.router.admission.in_flight import InFlight
from diptych.router.admission.queue import MAX_RETRY_AFTER_S
from diptych.router.admission.shed import NOTHING_SEEN, pressure, shares
from diptych.router.choose.policies.outlook import Outlook
from diptych.router.errors import Shed
from diptych.router.values.slo_tiers import Tier, Tiers

REFRESH_S: Final = 0.1  # that shares are used for
PRESENT_S: Final = 30.0  # that a tier counts for after its last request came
NO_OUTLOOK: Final = Outlook(0.0, 0.0)


class Shedder:
    """Looks at each request when it comes."""

    def __init__(
        self,
        tiers: Tiers,
        outlook: Callable[[], Outlook | None],
        in_flight: InFlight,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._may_shed = tiers.have_sheddable
        self._outlook = outlook
        self._in_flight = in_flight
        self._rng = rng
        self._clock = clock
        self._came_s: dict[str, float] = {}  # when the last request of a tier came
        self._shares: Mapping[str, float] = {}
        self._wait_s = 0.0  # that a request would wait for that came when they were found
        self._fresh_until_s = -math.inf

    def check(self, tier: Tier) -> None:
        """A request has come. Raises `Shed`."""
        if not self._may_shed:
            return
        now_s = self._clock()
        self._came_s[tier.name] = now_s
        if not tier.slo.sheddable or not len(self._in_flight):
            return
        if now_s >= self._fresh_until_s:
            self._refresh(now_s)
        share = self._shares[tier.name]
        if self._rng.random() < share:
            raise self._refusal(tier, share)

    def _refresh(self, now_s: float) -> None:
        slos, outlook, seen = self._tiers.slos, self._outlook() or NO_OUTLOOK, self._in_flight.seen(now_s)
        present = seen.keys() | {name for name, came_s in self._came_s.items() if now_s - came_s < PRESENT_S}
        pressures = {name: pressure(slos[name], outlook, seen.get(name, NOTHING_SEEN)) for name in present}
        self._shares, self._wait_s = shares(slos, pressures), outlook.wait_s
        self._fresh_until_s = now_s + REFRESH_S

    def _refusal(self, tier: Tier, share: float) -> Shed:
        retry_after_s = max(1, math.ceil(min(self._wait_s, MAX_RETRY_AFTER_S)))
        words = f"{100 * share:.0f} % of the requests of tier {tier.name!r} are refused now, so that others are in time"
        return Shed(f"{words}; try again in {retry_after_s} s", retry_after_s=retry_after_s)
