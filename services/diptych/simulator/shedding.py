"""Graded shedding in virtual time: the router's own `Shedder`, shown calls as they are served. Pure.

Workers tell of single tokens in the midst of an output by their number only, so the last token of an output that runs
is taken to have come just now: a step too late at most.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.generation.slo import Slo
from diptych.router.admission.in_flight import InFlight, InFlightRequest
from diptych.router.admission.shedder import Shedder
from diptych.router.choose.explain import Selection
from diptych.router.choose.policies.outlook import Outlook
from diptych.router.errors import Shed
from diptych.router.values.slo_tiers import DEFAULT_TIER, Tier, Tiers
from diptych.simulator.served import Served
from diptych.simulator.setup import Setup


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """What a call has been answered so far. `given` says how many tokens of an attempt have come."""

    served: Served
    given: Callable[[Served], int]
    clock: Callable[[], float]

    @property
    def first_s(self) -> float:
        return 0.0 if math.isnan(self.served.first_s) else self.served.first_s

    @property
    def last_s(self) -> float:
        return self.clock()

    @property
    def num_tokens(self) -> int:
        return self.given(self.served)


class SimShedding:
    """Says of calls that come whether they have to give way, and knows those that were let in."""

    def __init__(
        self,
        setup: Setup,
        outlook: Callable[[], Outlook | None],
        given: Callable[[Served], int],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._tiers = Tiers({DEFAULT_TIER: setup.slo, **setup.tiers})
        self._in_flight = InFlight()
        self._shedder = Shedder(self._tiers, outlook, self._in_flight, rng, clock)
        self._given = given
        self._clock = clock
        self._flights: dict[int, InFlightRequest] = {}  # by the numbers of calls
        self._selections: dict[int, Selection] = {}  # of their last attempts

    def sheds(self, served: Served) -> bool:
        """Whether a call that comes now is refused."""
        try:
            self._shedder.check(self._tier(served))
        except Shed:
            return True
        return False

    def weight(self, served: Served) -> float:
        """Return what a call's claim weighs in line; infinite: its tier is not sheddable."""
        slo: Slo = self._tier(served).slo
        return slo.weight if slo.sheddable else math.inf

    def began(self, served: Served) -> None:
        """It was let in."""
        if self._tiers.have_sheddable:
            answer = SimAnswer(served, self._given, self._clock)
            arrival_s = served.call.arrival_s
            flight = InFlightRequest(self._tier(served), arrival_s, answer, partial(self._compute_s, served.number))
            self._flights[served.number] = flight
            self._in_flight.add(flight)

    def sent(self, served: Served, selection: Selection) -> None:
        """An attempt of it begins."""
        if served.number in self._flights:
            self._selections[served.number] = selection

    def ended(self, served: Served) -> None:
        self._selections.pop(served.number, None)
        flight = self._flights.pop(served.number, None)
        if flight is not None:
            self._in_flight.remove(flight)

    def _tier(self, served: Served) -> Tier:
        name = served.call.tier if served.call.tier in self._tiers.slos else DEFAULT_TIER
        return Tier(name, self._tiers.slos[name])

    def _compute_s(self, number: int) -> float:
        """Return what a prompt takes by itself; 0: not known yet."""
        return self._selections[number].compute_s if number in self._selections else 0.0
