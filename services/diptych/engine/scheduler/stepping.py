"""How steps are run: one after the other, or with the scheduler's work for the next one behind the running one.

`QueuedSteps` hands steps to a runner that only queues them on a device, and fills in placeholders there. It
needs no thread: nothing waits but `result`, and meanwhile the device has the next forward pass to do already.

`TpModelWorkerClient` runs a model of the CPU in a thread of its own, so that the scheduler works while a step computes.
Jobs are done in order: forward, sample, forward, sample, ... A forward pass may be queued before the step before it is
sampled; its input then has placeholders for those tokens, which are filled in here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final, Protocol

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.values.batch import (
    ForwardBatch,
    OnLayer,
    OverlapRunner,
    Runner,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.engine.values.scheduler_core import SchedulerCore

LOOK_S: Final = 0.03  # between two looks whether a step is still wanted


class StepGivenUp(Exception):
    """The step was not run to its end, and never will be."""


class StepWatch:
    """Gives a step up, between two layers, once nobody wants what it computes.

    The loop hears nothing while a step runs, and one behind a long context may run for long. Short steps never look:
    they pay for two clocks. Steps are listened to in the thread that the watch is put over them in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_wanted: Callable[[], bool] | None = None
        self._thread = 0
        self._looked_s = 0.0

    def over(self, is_wanted: Callable[[], bool]) -> StepWatch:
        """Have a step that runs inside raise `StepGivenUp` soon after `is_wanted()` has become false."""
        self._is_wanted, self._thread = is_wanted, threading.get_ident()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._is_wanted = None

    def listener(self) -> OnLayer | None:
        """Return who is to hear of each layer of the next step; None when nobody watches."""
        if self._is_wanted is None or self._thread != threading.get_ident():
            return None
        self._looked_s = self._clock()
        return self._look

    def _look(self, layer: int) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if self._is_wanted is not None and not self._is_wanted():
            raise StepGivenUp


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
    """Runs steps while its caller plans the next one, in the order of the calls: forward, sample, forward, sample, ...

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
            self.meter.rest()
            return False
        self.meter.begin(batch, now_s)
        try:
            result = self._runner.execute(batch, self._core.sampling())
        except StepGivenUp:
            self.meter.give_up(self._clock())
            self._core.give_up()
            return True
        now_s = self._clock()
        self.meter.end(now_s - result.late_s)
        self._core.commit(result, now_s)
        perform()
        return True

    def close(self) -> None:
        pass


class OverlappedStepping:
    """While step n runs, step n+1 is planned and its forward pass queued, with placeholders for the tokens of step n.

    When these are known they are committed and go out, and only then is it said how to sample step n+1: penalties and
    grammars depend on them. Where the core cannot overlap just now, a step is committed before anything else happens.
    Where it cannot plan before a commit, which it does then is told while the next step runs.

    A step lasts until its device is done with it, and at least until the next one is begun: so times add up.
    """

    def __init__(self, core: SchedulerCore, worker: ModelWorker, clock: Callable[[], float]) -> None:
        self._core = core
        self._worker = worker
        self._clock = clock
        self._is_running = False  # a step was launched and not committed
        self._began_s = 0.0  # the step launched last
        self.meter = PrefillMeter()

    def advance(self, perform: Callable[[], None]) -> bool:
        was_running = self._is_running
        self._commit_unless_overlapped(perform)
        batch = self._begin(perform)
        if batch is None and self._is_running:
            self._commit(perform)
            batch = self._begin(perform)
        if batch is None:
            self.meter.rest()
        elif self._is_running:
            self._commit(perform)
        if batch is not None:
            self._worker.sample(self._core.sampling())
            self._is_running = True
            self._commit_unless_overlapped(perform)
        return was_running or batch is not None

    def _begin(self, perform: Callable[[], None]) -> ForwardBatch | None:
        """Plan a step and begin its forward pass, if there is one now."""
        now_s = self._clock()
        batch = self._core.plan(now_s)
        perform()
        if batch is not None:
            self._began_s = now_s
            self.meter.begin(batch, now_s)
            self._worker.forward(batch)
        return batch

    def _commit_unless_overlapped(self, perform: Callable[[], None]) -> None:
        if self._is_running and not self._core.can_overlap:
            self._commit(perform)

    def _commit(self, perform: Callable[[], None]) -> None:
        result, now_s = self._worker.result(), self._clock()
        if result.late_s > (since_s := now_s - self._began_s):
            result = replace(result, late_s=since_s)
        self.meter.end(now_s - result.late_s)
        self._core.commit(result, now_s)
        self._is_running = False
        perform()

    def close(self) -> None:
        self._worker.close()


class QueuedSteps:
    """Implements `ModelWorker`."""

    def __init__(self, runner: OverlapRunner) -> None:
        self._runner = runner
        self._passes: deque[tuple[ForwardBatch, Any]] = deque()  # to be sampled from, with their logits
        self._results: deque[WaitForResult] = deque()

    def forward(self, batch: ForwardBatch) -> None:
        self._passes.append((batch, self._runner.logits(batch)))

    def sample(self, sampling: SamplingBatch) -> None:
        batch, logits = self._passes.popleft()
        self._results.append(self._runner.sample(batch, logits, sampling))

    def result(self) -> StepResult:
        return self._results.popleft()()

    def close(self) -> None:
        """What is queued runs to its end by itself."""


class TpModelWorkerClient:
    """Implements `ModelWorker`. Hands steps to the thread; call from one other; `close` it."""

    def __init__(self, runner: OverlapRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[ForwardBatch | SamplingBatch | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model worker", daemon=True)
        self._thread.start()

    def forward(self, batch: ForwardBatch) -> None:
        self._jobs.put(batch)

    def sample(self, sampling: SamplingBatch) -> None:
        self._jobs.put(sampling)

    def result(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_steps()
        except BaseException as error:
            self._results.put(error)

    def _run_steps(self) -> None:
        newest: I64 = np.empty(0, dtype=np.int64)
        while isinstance(batch := self._jobs.get(), ForwardBatch):
            logits = self._runner.logits(fill_in(batch, newest))
            if not isinstance(sampling := self._jobs.get(), SamplingBatch):
                return
            result = self._runner.sample(batch, logits, sampling)()
            newest = result.token_ids
            self._results.put(result)


def fill_in(batch: ForwardBatch, newest: I64) -> ForwardBatch:
    """Replace placeholders by the tokens of the step before; see `batch_builder.placeholder`.

    `NO_TOKEN` becomes any token: its request fails, and what is computed for it is thrown away.
    """
    unknown = batch.input_ids < 0
    if not unknown.any():
        return batch
    input_ids = batch.input_ids.copy()
    input_ids[unknown] = np.maximum(newest[-1 - input_ids[unknown]], 0)
    return replace(batch, input_ids=input_ids)
