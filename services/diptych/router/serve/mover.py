"""Looks at running requests a few times a second, and has those go on elsewhere that `choose.moves` says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final

from diptych.router.choose.moves import LOOK_S, Moves, RunningOutput, departures, is_turn
from diptych.router.serve.execution import Dispatcher, Execution

MAX_OUTPUTS: Final = 1024  # of late workers, of which one look makes a choice


class Mover:
    """For one router, or one of its processes: it moves its own requests, when it is its turn."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.time) -> None:
        """`clock`: the one that all machines share."""
        self._dispatcher = dispatcher
        self._clock = clock
        self._moves = Moves()
        self._first = 0  # of the running requests, at which the next look begins

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Begin the moves that are due."""
        selector, running = self._dispatcher.selector, self._running()

        def outputs(worker_ids: Collection[int]) -> Mapping[int, RunningOutput]:
            own = ((place, each) for place, each in enumerate(running) if each.worker_id in worker_ids)
            return {place: output for place, each in islice(own, MAX_OUTPUTS) if (output := each.output()) is not None}

        candidates = selector.candidates("") if running else None
        usual, successors = selector.output_len, selector.successors
        for choice in self._moves.due(candidates, outputs, successors, usual, self._turn()):
            running[choice.place].move(choice.target_id, choice.words)
        leaving = self._dispatcher.fleet.vacating()
        if candidates is not None and leaving:
            for departure in departures(candidates.workers, outputs(leaving), successors, usual):
                running[departure.place].move(departure.target_id, departure.words)

    def _running(self) -> Sequence[Execution]:
        """Return all requests, at each look from where the one before it had seen enough: all come to be seen."""
        running = list(self._dispatcher.running)
        first = self._first if self._first < len(running) else 0
        self._first = first + MAX_OUTPUTS
        return [*running[first:], *running[:first]]

    def _turn(self) -> Callable[[int], bool]:
        """Return the answer to whether outputs may be taken from a worker now."""
        fleet, now_s = self._dispatcher.fleet, self._clock()
        routers = sorted({*fleet.routers(), fleet.router_id})
        place = routers.index(fleet.router_id)
        return lambda worker_id: is_turn(worker_id, place, len(routers), now_s)
