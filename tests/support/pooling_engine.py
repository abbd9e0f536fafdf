"""A worker's core and a real model in one process: legs in, outputs out, as a frontend would exchange them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.checkpoints.source import ModelSource
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.lora.registry import NONE
from diptych.engine.runner.kv_pool import new_kv
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.codec import output_to_wire, start_from_wire
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.values.events import Emit, Start
from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.limits import Limits
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import Output
from diptych.unified.core import UnifiedCore
from diptych.v1.worker_pb2 import LegOutput, StartLeg

PAGE_SIZE = 4


class PoolingEngine:
    """Steps of `max_step_tokens` over a pool of `num_pages`."""

    def __init__(self, source: ModelSource, max_step_tokens: int = 32, num_pages: int = 256) -> None:
        config = source.config
        layout = ModelRunner.pool_layout(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
        runner = ModelRunner(source, new_kv(layout, torch.device("cpu")), dtype="float32", max_requests=8)
        limits = Limits(config.context_len, config.vocab_size, frozenset(), max_step_tokens, 8, pooling=config.pooling)
        cache = KvCache(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_requests=9,
            max_tokens_per_request=limits.context_len,
            windows=window_pages(config, max_step_tokens),
        )
        self.core = UnifiedCore(cache, limits, TransferRules(), layout.page_nbytes, Role.PREFILL)
        self._stepping = SynchronousStepping(self.core, runner, lambda: self.now_s)
        self.now_s = 0.0
        self.num_steps = 0
        self._outputs: list[Output] = []

    def run(self, legs: Sequence[StartLeg]) -> dict[int, Output]:
        """Start all legs at once; return what each gave, by room."""
        for leg in legs:
            self.core.handle(self._start(leg), self.now_s)
        self._perform()
        while self._stepping.advance(self._perform):
            self.num_steps += 1
            self.now_s += 1.0
        found, self._outputs = {output.room: output for output in self._outputs}, []
        assert self.core.report().num_open_rooms == 0
        return found

    def _start(self, leg: StartLeg) -> Start:
        return start_from_wire(leg, NONE, now_s=self.now_s, max_tokens=self.core.max_tokens)

    def answer(self, leg: StartLeg) -> LegOutput:
        """Return what a leg gives, on the wire."""
        return output_to_wire(self.run([leg])[leg.room])

    def _perform(self) -> None:
        for effect in self.core.pop_effects():
            assert isinstance(effect, Emit), effect
            self._outputs.append(effect.output)
