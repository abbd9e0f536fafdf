"""The same calls in the simulation that takes its time: its stepping and its runner, on a clock that only they move."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import chats, platform

from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.sim.answers import SimVocabulary
from diptych.engine.sim.hardware import SimRunner
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.events import Emit, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.step_model import StepModel
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.layout import PoolLayout
from diptych.simulator.decisions import StepRecord
from diptych.simulator.prompts import prompt_of
from diptych.simulator.run import Platform
from diptych.simulator.setup import VOCAB_SIZE, Delays
from diptych.simulator.traces.call import Call
from diptych.unified.core import UnifiedCore

NUM_PAGES = 601  # far fewer than the prompts have: what is cached is evicted again
STEPS = StepModel(step=0.01, prompt_step=0.01, row=0.001, prompt_token=1e-5)  # those of `simulated`
WORDS = SimVocabulary(np.arange(2, 200))


class TimedWorker:
    """One worker of the real-time simulation. `run` serves calls by itself, from their arrival on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.record = StepRecord()
        self.last_s: dict[int, float] = {}
        layout = PoolLayout.kv(NUM_PAGES, num_layers=2, page_size=16, num_kv_heads=1, head_dim=4, dtype="float32")
        pages = MarkedPages(memoryview(bytearray(layout.nbytes)), layout)
        self._runner = SimRunner(pages, WORDS, STEPS, clock=lambda: self.now_s, sleep=self._sleep)
        cache = KvCache(num_pages=NUM_PAGES, page_size=16, max_requests=256, max_tokens_per_request=8192)
        limits = Limits(8192, VOCAB_SIZE, frozenset(), 8192, 256, mixed_step_s=0.1)
        self._core = UnifiedCore(cache, limits, TransferRules("off"), layout.page_nbytes, Role.UNIFIED)
        self._stepping = SynchronousStepping(self._core, self, lambda: self.now_s)

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        """Implements `Runner`."""
        self.record.launched([room - 1 for room in self._core.rooms_of_step()], batch)
        return self._runner.execute(batch, sampling)

    def run(self, calls: list[Call]) -> None:
        coming = list(enumerate(calls))
        while coming or len(self.last_s) < len(calls):
            while coming and coming[0][1].arrival_s <= self.now_s:
                self._start(*coming.pop(0))
            if not self._stepping.advance(self._perform):
                self.now_s = coming[0][1].arrival_s

    def _start(self, number: int, one: Call) -> None:
        params = SamplingParams(max_tokens=one.output_len, temperature=0.0, ignore_eos=True)
        request = new_request(number + 1, prompt_of(one, number).ids, params)
        self._core.handle(Start(request, 0, LegKind.LOCAL), self.now_s)

    def _perform(self) -> None:
        for effect in self._core.pop_effects():
            if isinstance(effect, Emit) and effect.output.finish is not None:
                self.last_s[effect.output.room - 1] = self.now_s

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_same_calls_are_decided_the_same_in_real_time() -> None:
    calls = chats(40, apart_s=0.15)
    timed = TimedWorker()
    timed.run(calls)
    made = Platform(platform("U", worker_changes={"num_pages": NUM_PAGES}, delays=Delays(leg_s=0.0)))
    served = made.offer(calls)
    while made.front.num_ended < len(calls):
        made.clock.step()
    assert made.decisions.of_worker(1).num_steps == timed.record.num_steps > 500
    assert made.decisions.of_worker(1).digest() == timed.record.digest()
    assert [each.last_s for each in served] == pytest.approx([timed.last_s[number] for number in range(len(calls))])
