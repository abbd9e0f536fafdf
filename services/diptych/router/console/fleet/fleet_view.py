"""Gathers what a router knows of its fleet, and what its watches tell, into the document of the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from diptych.common.version import own_version
from diptych.router.choose.breakers import Breakers
from diptych.router.console.fleet.fleet_state import LinkMemo, fleet_state
from diptych.router.console.fleet.watches import Watches
from diptych.router.console.fleet.worker_facts import RouterFacts, WorkerFacts
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import FleetState
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.session import Session


class FleetView:
    """The fleet as this router sees it."""

    def __init__(
        self,
        fleets: Sequence[Fleet],
        watches: Watches,
        breakers: Breakers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fleets` of each model, the first one with the sessions of all."""
        self._fleets = fleets
        self._fleet = fleets[0]
        self._watches = watches
        self._breakers = breakers
        self._clock = clock  # the breakers'
        self._version = own_version()
        self._memo = LinkMemo()

    def state(self) -> Pieces[FleetState]:
        """Return the topic `fleet` as it is now; a worker that leaves meanwhile may still be in it."""
        fleet = self._fleet
        here = RouterFacts(
            instance_id=fleet.router_id,
            version=self._version,
            model_id=fleet.model_id,
            problem="; ".join(words for each in self._fleets if (words := each.problem())) or None,
            routers=tuple(fleet.routers().values()),
            pauses=self._breakers.pauses(self._clock()),
            pools=fleet.pools,
            others=tuple(each.model_id for each in self._fleets[1:]),
        )
        workers = []
        for session in fleet.sessions():
            workers.append(self._facts(session))
            yield
        return (yield from fleet_state(here, workers, self._memo))

    def _facts(self, session: Session) -> WorkerFacts:
        key, fleet, watches = session.instance_id, self._fleet, self._watches
        return WorkerFacts(
            record=session.worker.record,
            reported=session.worker.load,
            view=session.view(),
            load=session.load(),
            speed=session.estimates.of(key) if session.estimates.are_measured else None,
            cached_pages=fleet.prefixes.told.num_pages(key),
            status=watches.status(key),
            links=watches.links(key),
            rate=watches.rate(key),
            link_rates=watches.link_rates(key),
        )
