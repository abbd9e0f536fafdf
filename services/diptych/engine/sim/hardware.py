"""A simulated processor: its KV pool is in host memory, and a step takes the time of another's.

A simulated model has the real one's configuration and tokenizer, without its weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import F32, I64, U64
from diptych.common.errors import ConfigError
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.lora.host import NoAdapters
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import pool_layout, token_nbytes
from diptych.engine.options.served_model import as_served
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.options.sim_timing import read_timing
from diptych.engine.schedule.pace.step_sizes import Chosen, Found, choose
from diptych.engine.sim.answers import SimVocabulary, digests, marks, vocabulary_of
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.engine.tensor_parallel.company import Lead
from diptych.engine.tensor_parallel.group import RankGroup, SingleRank
from diptych.engine.tensor_parallel.trainer_groups import NoGroups
from diptych.engine.values.batch import (
    NO_GRAPHS,
    NO_TOKEN,
    DraftModel,
    ForwardBatch,
    ImageCounts,
    Labels,
    OnLayer,
    SamplingBatch,
    StepResult,
    WaitForEnd,
    WaitForResult,
)
from diptych.engine.values.rounds import Round
from diptych.engine.values.step_model import StepModel, StepShape
from diptych.generation.logprobs import LogprobsBatch
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import Pool, TransportMemory
from diptych.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # needs torch
    from diptych.engine.models.adapters.lora import Loras

IMPOSSIBLE: Final = -100.0  # log-probability of what the model would not say

_SEED_STEP: Final = np.uint64(0xD6E8FEB86659FD93)


class SimulatedModel:
    """A model as a simulation serves it. Workers that compute it are no peers: their KV is another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.config = source.config
        self.weights_id = hashlib.sha256(f"simulated {source.weights_id}".encode()).hexdigest()[:32]
        self.weight_files: Sequence[Path] = ()

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError("a simulated model has no weights")

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart

    def next_layer(self) -> ModelSource:
        raise ConfigError("a simulated model has no layers that guess")


class SimHardware:
    """Implements `Hardware`."""

    device_name = "sim"
    chosen: Chosen
    _memory: memoryview
    _pages: MarkedPages

    def __init__(self, options: EngineOptions) -> None:
        self.options = options.on("sim")
        self._timing = read_timing(options.sim_timing)

    def open(self, model: str) -> ModelSource:
        return SimulatedModel(as_served(open_model(model, self.options.load_format), self.options))

    def ranks(self, lead: Lead) -> RankGroup:
        return SingleRank()

    def share_experts(self, place: SharedExperts, rank: int) -> None:
        raise AssertionError("--dp-attention is refused with --device sim")

    def begin_round(self, common: Round) -> None:
        raise AssertionError("--dp-attention is refused with --device sim")

    def pool_layout(self, source: ModelSource, rank: int) -> PoolLayout:
        layout = pool_layout(source.config, self.options)
        kv_tokens = layout.nbytes // token_nbytes(source.config, layout)
        found = Found(self._timing.prompt_tokens_per_s, 0.0, math.inf, kv_tokens)
        self.chosen = choose(self.options.given_sizes, lambda: found, source.config.context_len, int)
        return layout

    def allocate(self, layout: PoolLayout, memory: TransportMemory | None) -> Pool | None:
        pool = memory.allocate_pool(layout) if memory is not None else None
        self._memory = memoryview(bytearray(layout.nbytes)) if pool is None else pool.buffer
        self._pages = MarkedPages(self._memory, layout)
        return pool

    def load(self, source: ModelSource, layer_listener: Callable[[], OnLayer | None]) -> SimRunner:
        vocabulary = vocabulary_of(source.tokenizer(), source.config.vocab_size)
        config = source.config
        size = 0 if config.pooling is None else config.pooling.size(config.hidden_size)
        return SimRunner(self._pages, vocabulary, self._timing, layer_listener, vector_size=size)

    def in_place(self, runner: Any) -> NoParts:
        return NoParts(runner)

    def groups(self, rank: int) -> NoGroups:
        return NoGroups()

    def adapters(self, source: ModelSource, rank: int, loras: Callable[[], Loras]) -> NoAdapters:
        return NoAdapters()

    def pool_bytes(self) -> memoryview:
        return self._memory

    def host_pages(self, layout: PoolLayout, num_slots: int, rank: int) -> PageCopier:
        return HostPages(self._memory, layout.page_nbytes, num_slots)


class NoParts:
    """Implements `InPlace`: a simulated model has no weights."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def release(self) -> None:
        pass

    def take(self, source: ModelSource) -> None:
        pass

    def want_all(self) -> None:
        pass

    def lacking(self) -> list[str]:
        return []

    def settle(self) -> None:
        pass

    def runner(self) -> Any:
        return self._runner


class SimRunner:
    """Implements `OverlapRunner`: writes marks where KV goes, reads them where attention does, and takes its time.

    Sampling: greedy by default; with a temperature the token follows from the seed, too. Masks and banned tokens are
    kept; other parameters change nothing. The model is sure of itself: its own choice has probability 1.
    """

    graph_use = NO_GRAPHS
    image_counts = ImageCounts()
    draft_model: DraftModel | None = None

    def __init__(
        self,
        pages: MarkedPages,
        vocabulary: SimVocabulary,
        timing: StepModel,
        layer_listener: Callable[[], OnLayer | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        vector_size: int = 0,
    ) -> None:
        """`vector_size`: numbers of what a model makes of a prompt in place of text; 0: it makes text."""
        self._pages = pages
        self._vocabulary = vocabulary
        self._timing = timing
        self._layer_listener = layer_listener
        self._clock = clock
        self._sleep = sleep
        self._vector_size = vector_size

    def memory(self) -> None:
        """It has no weights."""

    @property
    def loras(self) -> Loras:
        raise ConfigError("a simulated model takes no adapters")

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> U64:
        """Write the batch's KV; return the digests behind the rows to sample from, and then behind the prompt rows."""
        start_s, step_s = self._clock(), self._timing.seconds(StepShape.of(batch))
        fresh, on_layer = marks(batch.input_ids, batch.positions), self._layer_listener()
        for layer in range(self._pages.num_layers):
            self._wait_until(start_s + step_s * layer / self._pages.num_layers)
            self._pages.write(layer, batch.out_slots, fresh)
            if on_layer is not None:
                on_layer(layer)
        found = self._digests(batch)
        self._wait_until(start_s + step_s)
        return found

    def new_end(self) -> WaitForEnd:
        """Every step has ended when its call has."""
        return lambda: None

    def serve_others(self) -> None:
        raise AssertionError("--dp-attention is refused with --device sim")

    def sample(self, batch: ForwardBatch, logits: U64, sampling: SamplingBatch) -> WaitForResult:
        num_samples, prompt_rows = len(sampling.temperature), batch.prompt_rows
        sure = self._vocabulary.tokens(logits)
        token_ids = self._choose(logits[:num_samples], sampling)
        result = StepResult(
            token_ids,
            None if sampling.num_top is None else _logprobs(sure[:num_samples], token_ids, int(sampling.num_top.max())),
            None if prompt_rows is None else _logprobs(sure[num_samples:], prompt_rows.target_ids, prompt_rows.num_top),
            self._vectors(logits[:num_samples], sampling.labels),
        )
        return lambda: result

    def _vectors(self, found: U64, labels: Labels | None) -> list[F32] | None:
        """Return what follows from each text where vectors are made; of labels that all are as likely."""
        if self._vector_size:
            return [np.random.default_rng(int(each)).standard_normal(self._vector_size, np.float32) for each in found]
        if labels is None:
            return None
        lens = np.bincount(labels.rows, minlength=len(found))
        return [np.full(num, -math.log(num) if num else 0.0, np.float32) for num in lens.tolist()]

    def _wait_until(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _digests(self, batch: ForwardBatch) -> U64:
        tokens = batch.sampled_tokens
        if batch.prompt_rows is not None:
            tokens = np.append(tokens, batch.prompt_rows.token_rows)
        rows, lens = batch.rows_of(tokens), batch.positions[tokens] + 1
        seen = {row: self._pages.read(batch.page_table[row], int(batch.seq_lens[row])) for row in set(rows.tolist())}
        found = {row: digests(each) for row, each in seen.items()}
        return np.array([found[row][end - 1] for row, end in zip(rows.tolist(), lens, strict=True)], np.uint64)

    def _choose(self, found: U64, sampling: SamplingBatch) -> I64:
        """Return the next tokens; `NO_TOKEN` where a mask allows none."""
        drawn = (sampling.seeds + sampling.positions.astype(np.uint64)) * _SEED_STEP
        found = np.where(sampling.temperature > 0, found ^ drawn, found)
        token_ids = self._vocabulary.tokens(found)
        for row in _constrained(sampling):
            allowed = self._allowed(row, sampling)
            if token_ids[row] not in allowed:
                token_ids[row] = allowed[found[row] % np.uint64(len(allowed))] if len(allowed) else NO_TOKEN
        return token_ids

    def _allowed(self, row: int, sampling: SamplingBatch) -> I64:
        allowed = self._vocabulary.ids
        if sampling.token_mask is not None:
            bits = np.unpackbits(sampling.token_mask[row].view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
        if sampling.bias is not None:
            banned = (sampling.bias.rows == row) & np.isneginf(sampling.bias.values)
            allowed = np.setdiff1d(allowed, sampling.bias.token_ids[banned])
        return allowed


def _constrained(sampling: SamplingBatch) -> I64:
    """Return the rows whose tokens must be looked at."""
    if sampling.token_mask is not None:
        return np.arange(len(sampling.token_mask))
    return np.empty(0, np.int64) if sampling.bias is None else np.unique(sampling.bias.rows)


def _logprobs(sure: I64, token_ids: I64, num_top: int) -> LogprobsBatch:
    """Return those of `token_ids`, where the model would say `sure`, and of so many alternatives, in any order."""
    others = (np.where(other < sure, other, other + 1) for other in range(num_top - 1))
    tops = np.stack([sure, *others], axis=1)[:, : max(num_top, 0)]
    top_logprobs = np.full(tops.shape, IMPOSSIBLE, np.float32)
    top_logprobs[:, :1] = 0.0
    return LogprobsBatch(np.where(sure == token_ids, 0.0, IMPOSSIBLE).astype(np.float32), tops, top_logprobs)
