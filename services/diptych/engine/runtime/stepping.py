"""How steps are run: one after the other, or with the scheduler's work for the next one behind the running one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diptych.engine.batch import Runner
from diptych.engine.events import SchedulerCore
from diptych.engine.runtime.model_worker import TpModelWorkerClient


class Stepping(Protocol):
    """Advances a core."""

    def advance(self, perform: Callable[[], None]) -> bool:
        """Go one step further; False when there is nothing to compute. `perform` carries out the core's effects."""
        ...

    def close(self) -> None: ...


class SynchronousStepping:
    """Plan, forward, commit."""

    def __init__(self, core: SchedulerCore, runner: Runner, clock: Callable[[], float]) -> None:
        self._core = core
        self._runner = runner
        self._clock = clock

    def advance(self, perform: Callable[[], None]) -> bool:
        batch = self._core.plan(self._clock())
        perform()
        if batch is None:
            return False
        result = self._runner.execute(batch, self._core.sampling())
        self._core.commit(result, self._clock())
        perform()
        return True

    def close(self) -> None:
        pass


class OverlappedStepping:
    """While step n runs, step n+1 is planned and its forward pass queued, with placeholders for the tokens of step n.

    When these are known they are committed and go out, and only then is it said how to sample step n+1: penalties and
    grammars depend on them.
    """

    def __init__(self, core: SchedulerCore, worker: TpModelWorkerClient, clock: Callable[[], float]) -> None:
        self._core = core
        self._worker = worker
        self._clock = clock
        self._is_running = False  # a step was launched and not committed

    def advance(self, perform: Callable[[], None]) -> bool:
        batch = self._core.plan(self._clock())
        perform()
        if batch is not None:
            self._worker.forward(batch)
        was_running, self._is_running = self._is_running, batch is not None
        if was_running:
            self._core.commit(self._worker.result(), self._clock())
            perform()
        if batch is not None:
            self._worker.sample(self._core.sampling())
        return was_running or self._is_running

    def close(self) -> None:
        self._worker.close()
