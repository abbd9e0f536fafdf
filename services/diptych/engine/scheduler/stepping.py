"""How steps are run: one after the other, or with the scheduler's work for the next one behind the running one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diptych.engine.schedule.prefill_meter import PrefillMeter
from diptych.engine.scheduler.step_watch import StepGivenUp
from diptych.engine.values.batch import ForwardBatch, Runner, SamplingBatch, StepResult
from diptych.engine.values.scheduler_core import SchedulerCore


class Stepping(Protocol):
    """Advances a core."""

    @property
    def meter(self) -> PrefillMeter:
        """What has been measured of its steps."""
        ...

    def advance(self, perform: Callable[[], None]) -> bool:
        """Go one step further; False when there is nothing to compute. `perform` carries out the core's effects."""
        ...

    def close(self) -> None: ...


class ModelWorker(Protocol):
    """Runs steps while its caller plans the next one: forward, sample, forward, sample, ..., in the order of the calls.

    A forward pass may be handed over before the step before it is sampled, with placeholders for those tokens.
    """

    def forward(self, batch: ForwardBatch) -> None:
        """Begin a forward pass. `sample` must follow."""
        ...

    def sample(self, sampling: SamplingBatch) -> None:
        """Say how to sample the pass begun last."""
        ...

    def result(self) -> StepResult:
        """Wait for the oldest step's result. Raises what the step raised."""
        ...

    def close(self) -> None:
        """Stop after what runs now. Idempotent."""
        ...


class SynchronousStepping:
    """Plan, forward, commit."""

    def __init__(self, core: SchedulerCore, runner: Runner, clock: Callable[[], float]) -> None:
        self._core = core
        self._runner = runner
        self._clock = clock
        self.meter = PrefillMeter()

    def advance(self, perform: Callable[[], None]) -> bool:
        now_s = self._clock()
        batch = self._core.plan(now_s)
        perform()
        if batch is None:
            return False
        self.meter.begin(batch, now_s)
        try:
            result = self._runner.execute(batch, self._core.sampling())
        except StepGivenUp:
            self.meter.give_up(self._clock())
            self._core.give_up()
            return True
        now_s = self._clock()
        self.meter.end(now_s)
        self._core.commit(result, now_s)
        perform()
        return True

    def close(self) -> None:
        pass


class OverlappedStepping:
    """While step n runs, step n+1 is planned and its forward pass queued, with placeholders for the tokens of step n.

    When these are known they are committed and go out, and only then is it said how to sample step n+1: penalties and
    grammars depend on them. Where the core cannot overlap just now, a step is committed before anything else happens.
    """

    def __init__(self, core: SchedulerCore, worker: ModelWorker, clock: Callable[[], float]) -> None:
        self._core = core
        self._worker = worker
        self._clock = clock
        self._is_running = False  # a step was launched and not committed
        self.meter = PrefillMeter()

    def advance(self, perform: Callable[[], None]) -> bool:
        was_running = self._is_running
        self._commit_unless_overlapped(perform)
        now_s = self._clock()
        batch = self._core.plan(now_s)
        perform()
        if batch is not None:
            self.meter.begin(batch, now_s)
            self._worker.forward(batch)
        if self._is_running:
            self._commit(perform)
        if batch is not None:
            self._worker.sample(self._core.sampling())
            self._is_running = True
            self._commit_unless_overlapped(perform)
        return was_running or batch is not None

    def _commit_unless_overlapped(self, perform: Callable[[], None]) -> None:
        if self._is_running and not self._core.can_overlap:
            self._commit(perform)

    def _commit(self, perform: Callable[[], None]) -> None:
        result, now_s = self._worker.result(), self._clock()
        self.meter.end(now_s)
        self._core.commit(result, now_s)
        self._is_running = False
        perform()

    def close(self) -> None:
        self._worker.close()
