"""Runs a model of the CPU in a thread of its own, so that the scheduler works while a step computes.

Jobs are done in order: forward, sample, forward, sample, ... A forward pass may be queued before the step before it is
sampled; its input then has placeholders for those tokens, which are filled in here.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult


class TpModelWorkerClient:
    """Implements `ModelWorker`. Hands steps to the thread; call from one other; `close` it."""

    def __init__(self, runner: OverlapRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[ForwardBatch | SamplingBatch | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model worker", daemon=True)
        self._thread.start()

    def forward(self, batch: ForwardBatch) -> None:
        """Queue a forward pass. `sample` must follow."""
        self._jobs.put(batch)

    def sample(self, sampling: SamplingBatch) -> None:
        """Say how to sample the pass queued last."""
        self._jobs.put(sampling)

    def result(self) -> StepResult:
        """Wait for the oldest step's result. Raises what the step raised."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End the thread after what it computes now. Idempotent."""
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
