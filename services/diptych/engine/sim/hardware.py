"""A simulated processor: its KV pool is in host memory, and a step takes the time of another's."""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.batch import OnLayer
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.runtime.pool_size import pool_layout
from diptych.engine.runtime.scheduler_config import EngineOptions
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.engine.sim.model import SimulatedModel, speech_of
from diptych.engine.sim.runner import SimRunner
from diptych.engine.sim.timing import read_timing
from diptych.engine.tensor_parallel.group import Alone, RankGroup
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import Pool, Transport


class SimHardware:
    """Implements `Hardware`."""

    _memory: memoryview
    _pages: MarkedPages

    def __init__(self, options: EngineOptions) -> None:
        self.options = options.on("sim")
        self._timing = read_timing(options.sim_timing)

    def open(self, model: str) -> ModelSource:
        return SimulatedModel(open_model(model, self.options.load_format))

    def ranks(self, endpoint: str) -> RankGroup:
        return Alone()

    def pool_layout(self, source: ModelSource, rank: int) -> PoolLayout:
        return pool_layout(source.config, self.options)

    def allocate(self, layout: PoolLayout, transport: Transport | None) -> Pool | None:
        pool = transport.allocate_pool(layout) if transport is not None else None
        self._memory = memoryview(bytearray(layout.nbytes)) if pool is None else pool.buffer
        self._pages = MarkedPages(self._memory, layout)
        return pool

    def load(self, source: ModelSource, layer_listener: Callable[[], OnLayer | None]) -> SimRunner:
        speech = speech_of(source.tokenizer(), source.config.vocab_size)
        return SimRunner(self._pages, speech, self._timing, layer_listener)

    def pool_bytes(self) -> memoryview:
        return self._memory
