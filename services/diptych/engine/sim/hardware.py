"""A simulated processor: its KV pool is in host memory, and a step takes the time of another's.

A simulated model has the real one's configuration and tokenizer, without its weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ModelSource, bounded, open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import pool_layout
from diptych.engine.options.sim_timing import read_timing
from diptych.engine.schedule.step_sizes import Chosen, Found, choose
from diptych.engine.sim.answers import speech_of
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.engine.sim.runner import SimRunner
from diptych.engine.tensor_parallel.group import Alone, RankGroup
from diptych.engine.values.batch import OnLayer
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import Pool, TransportMemory
from diptych.tokens.tokenizer import Tokenizer


class SimulatedModel:
    """A model as a simulation serves it. Workers that compute it are no peers: their KV is another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.config = source.config
        self.weights_id = hashlib.sha256(f"simulated {source.weights_id}".encode()).hexdigest()[:32]

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError("a simulated model has no weights")


class SimHardware:
    """Implements `Hardware`."""

    chosen: Chosen
    _memory: memoryview
    _pages: MarkedPages

    def __init__(self, options: EngineOptions) -> None:
        self.options = options.on("sim")
        self._timing = read_timing(options.sim_timing)

    def open(self, model: str) -> ModelSource:
        return SimulatedModel(bounded(open_model(model, self.options.load_format), self.options.max_model_len))

    def ranks(self, endpoint: str) -> RankGroup:
        return Alone()

    def pool_layout(self, source: ModelSource, rank: int) -> PoolLayout:
        layout = pool_layout(source.config, self.options)
        found = Found(self._timing.prompt_tokens_per_s, 0.0, math.inf, layout.num_pages * layout.page_size)
        self.chosen = choose(self.options.given_sizes, lambda: found, source.config.context_len, int)
        return layout

    def allocate(self, layout: PoolLayout, memory: TransportMemory | None) -> Pool | None:
        pool = memory.allocate_pool(layout) if memory is not None else None
        self._memory = memoryview(bytearray(layout.nbytes)) if pool is None else pool.buffer
        self._pages = MarkedPages(self._memory, layout)
        return pool

    def load(self, source: ModelSource, layer_listener: Callable[[], OnLayer | None]) -> SimRunner:
        speech = speech_of(source.tokenizer(), source.config.vocab_size)
        return SimRunner(self._pages, speech, self._timing, layer_listener)

    def pool_bytes(self) -> memoryview:
        return self._memory
