"""Looks at running requests a few times a second, and has those go on elsewhere that `choose.moves` says."""

from __future__ import annotations

import asyncio

from diptych.router.choose.moves import LOOK_S, Moves
from diptych.router.serve.execution import Dispatcher


class Mover:
    """For one router, or one of its processes: it moves its own requests."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._moves = Moves()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Begin the moves that are due."""
        selector, running = self._dispatcher.selector, list(self._dispatcher.running)
        outputs = (each.output() for each in running)
        by_place = ((place, output) for place, output in enumerate(outputs) if output is not None)
        candidates = selector.candidates("") if running else None
        for choice in self._moves.due(candidates, lambda: dict(by_place), self._partners, selector.output_len):
            running[choice.place].move(choice.target_id, choice.words)

    def _partners(self, worker_id: int, adapter: str) -> frozenset[int]:
        """Return who may go on with a worker's requests that have an adapter."""
        candidates = self._dispatcher.selector.candidates(adapter)
        return frozenset(candidates.partners.get(worker_id, ())) if candidates else frozenset()
