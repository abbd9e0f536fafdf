"""Looks at running requests a few times a second, and has those go on elsewhere that `choose.moves` says."""

from __future__ import annotations

import asyncio
from typing import Final

from diptych.router.choose.moves import Lateness, RunningOutput, best_move
from diptych.router.choose.policies.policy import Candidates
from diptych.router.serve.execution import Dispatcher, Execution

LOOK_S: Final = 0.25


class Mover:
    """For one router, or one of its processes: it moves its own requests."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lateness = Lateness()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Begin the moves that are due: one at most from each worker."""
        selector = self._dispatcher.selector
        candidates = selector.candidates("") if self._dispatcher.running else None
        late = self._lateness.look(candidates.workers.values() if candidates else ())
        if late and candidates:
            self._relieve(late, candidates)

    def _relieve(self, late: list[int], candidates: Candidates) -> None:
        running = list(self._dispatcher.running)
        outputs = {place: output for place, each in enumerate(running) if (output := each.output()) is not None}
        for worker_id in late:
            if worker_id in candidates.partners:
                own = {place: output for place, output in outputs.items() if output.worker_id == worker_id}
                self._relieve_one(worker_id, running, own, candidates)

    def _relieve_one(
        self, worker_id: int, running: list[Execution], own: dict[int, RunningOutput], candidates: Candidates
    ) -> None:
        selector, workers = self._dispatcher.selector, candidates.workers
        targets = {key: workers[key] for key in candidates.partners[worker_id] if key != worker_id}
        allowed = {name: self._partners(worker_id, name) for name in {output.adapter for output in own.values()}}
        choice = best_move(workers[worker_id], own, targets, allowed, selector.output_len)
        if choice is not None:
            running[choice.place].move(choice.target_id, choice.words)

    def _partners(self, worker_id: int, adapter: str) -> frozenset[int]:
        """Return who may go on with a worker's requests that have an adapter."""
        candidates = self._dispatcher.selector.candidates(adapter)
        return frozenset(candidates.partners.get(worker_id, ())) if candidates else frozenset()
