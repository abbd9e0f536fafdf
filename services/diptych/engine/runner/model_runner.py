"""Runs a batch on the model, where the KV pool is: the engine's `Runner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource
from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch, logits_rows, stage
from diptych.engine.models.adapters.lora import Loras
from diptych.engine.runner.attention_capture import StepCapture
from diptych.engine.runner.draft_model import CpuDraftModel
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_with_draft
from diptych.engine.runner.micro_batches import NOBODYS, halves_of_round
from diptych.engine.runner.next_layer import CpuNextLayer
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.tensor_parallel.pipeline.staged_drafts import StagedDraftModel
from diptych.engine.values.batch import (
    NO_GRAPHS,
    DraftModel,
    ForwardBatch,
    ImageCounts,
    OnLayer,
    SamplingBatch,
    StepResult,
    WaitForEnd,
    WaitForResult,
)
from diptych.engine.values.kv_regions import kv_layout
from diptych.engine.weights.memory import WeightMemory
from diptych.engine.weights.taking import Taking
from diptych.generation.insight import Insight
from diptych.kvtransfer.layout import PoolLayout


def new_follower(draft: LoadedModel, device: torch.device) -> CpuDraftModel:
    """Return who computes steps behind the model that `draft` guesses for."""
    return CpuNextLayer(draft, device) if draft.config.joins_rows else CpuDraftModel(draft, device)


def _in_pipeline(
    own: CpuDraftModel | None, draft: ModelSource | None, communicator: Communicator | None
) -> DraftModel | None:
    """Return what guesses as this rank sees it; `own`: what it has of that itself."""
    stages = None if communicator is None else communicator.stages
    if draft is None or stages is None:
        return own
    return StagedDraftModel(own, stages, draft.config.hidden_size)


class WatchedLogits(Tensor):
    """The logits of a step in which somebody asks for more than tokens, and the answer: see `StepResult`.

    It goes with the logits, and not into the runner: the next step may be launched before this one is sampled.
    """

    insight: Mapping[int, Insight]

    @staticmethod
    def of(logits: Tensor, insight: Mapping[int, Insight]) -> WatchedLogits:
        watched: WatchedLogits = logits.as_subclass(WatchedLogits)
        watched.insight = insight
        return watched


class ModelRunner:
    """Loads a model onto a KV pool. One thread at a time may call it."""

    graph_use = NO_GRAPHS

    def __init__(
        self,
        source: ModelSource,
        kv: Tensor,
        *,
        dtype: str,
        quantization: str = "auto",
        attention_backend: str = "auto",
        decode_attention_backend: str | None = None,
        num_threads: int = 1,
        max_loras: int = 0,
        max_lora_rank: int = 16,
        max_requests: int = 1,
        row_tokens: int = 1,
        communicator: Communicator | None = None,
        layer_listener: Callable[[], OnLayer | None] = lambda: None,
        deterministic: bool = False,
        expert_parallel: bool = False,
        overlap_batches: bool = False,
        draft: ModelSource | None = None,
        taking: Taking | None = None,
        on_tower_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """With a `communicator` load one rank's part; `kv` is then the pool of that part.

        `draft` guesses for the model; its layers are `source.config.draft`. `taking`: from whom weights may come.

        `row_tokens`: of the longest row that a request may have, with its drafts.

        `decode_attention_backend` is for steps without prompts; None: as the others. `layer_listener` is asked before
        each step who is to hear of its layers. `on_tower_layer` hears of each layer of the tower: images take long.
        """
        torch.set_num_threads(num_threads)
        options = ModelOptions(
            dtype=dtype,
            quantization=quantization,
            attention_backend=attention_backend,
            decode_attention_backend=decode_attention_backend,
            num_threads=num_threads,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            max_requests=max_requests,
            row_tokens=row_tokens,
            deterministic=deterministic,
            expert_parallel=expert_parallel,
            overlap_batches=overlap_batches,
        )
        self.model = load_with_draft(source, draft, kv, options, communicator, taking)
        self._follower = None if self.model.draft is None else new_follower(self.model.draft, kv.device)
        self.draft_model = _in_pipeline(self._follower, draft, communicator)
        self._device = kv.device
        self._sharing = None if communicator is None else communicator.experts
        self._memory: WeightMemory | None = None
        self.layer_listener = layer_listener
        self._on_tower_layer = on_tower_layer

    @property
    def image_counts(self) -> ImageCounts:
        return self.model.image_counts

    @property
    def loras(self) -> Loras:
        return self.model.loras

    def memory(self) -> WeightMemory:
        """In any thread. It is the same at all times, and found when it is asked for first."""
        if self._memory is None:
            self._memory = self.model.memory()
        return self._memory

    @staticmethod
    def pool_layout(config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> PoolLayout:
        """Return the layout of a pool for this model."""
        return kv_layout(config, num_pages, page_size, dtype)

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        """Write the batch's KV and sample."""
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's KV; return the logits of the rows to sample from, and then of the prompt rows."""
        with torch.inference_mode():
            if batch.encodes:
                return self.model.encode(batch, self._on_tower_layer)
            states = self.model.states
            if states is not None:
                batch = states.before(batch)
            capture, on_layer = self.model.capture.of_step(batch), self.layer_listener()
            if (parts := halves_of_round(self._sharing, batch)) is None:
                logits = self.model.forward(self._prepared(batch, self.model.attention, capture), on_layer)
            else:
                pairs = zip(parts, self.model.attentions, strict=True)
                staged = [
                    None if part is None else self._prepared(part, attention, capture) for part, attention in pairs
                ]
                found = self.model.forward_both(staged, self._device, on_layer)
                logits = torch.cat([each for each in found if each is not None])
            if self._follower is not None and batch.is_followed:
                self._follower.follow(batch, on_layer)
            if states is not None:
                states.behind(batch)
            return logits if capture is None else WatchedLogits.of(logits, capture.result())

    def _prepared(self, batch: ForwardBatch, attention: PhasedAttention, capture: StepCapture | None) -> StagedBatch:
        """Return a step, or a half of one, which `attention` was told of."""
        states = self.model.states
        staged = self.model.with_rows(stage(batch, self._device), self._on_tower_layer)
        staged = staged if states is None else states.staged(staged)
        attention.init_forward_metadata(staged)
        rows = logits_rows(batch) if self.model.pooler is None else self.model.pooler.rows(batch)
        self.loras.begin(batch.adapters, batch.extend_lens, rows)
        return replace(staged, logits_rows=torch.from_numpy(rows).to(self._device), watcher=capture)

    def new_end(self) -> WaitForEnd:
        """Every step has ended when its call has."""
        return lambda: None

    def serve_others(self) -> None:
        """Take part in a step of schedulers that share our experts, without a token."""
        with torch.inference_mode():
            if halves_of_round(self._sharing, None) is None:
                self.model.serve_others(self._device)
            else:
                self.model.forward_both(NOBODYS, self._device)

    def sample(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> WaitForResult:
        """Choose the batch's next tokens by its logits, which may be overwritten."""
        with torch.inference_mode():
            if self.model.pooler is not None:
                pooled = self.model.pooler.result(logits, batch)
                return lambda: pooled
            insight = logits.insight if isinstance(logits, WatchedLogits) else None
            plain = logits.as_subclass(Tensor).cpu()
            result = sample_step(self.model.sampler, plain, sampling, batch.prompt_rows)
            return lambda: result if insight is None else replace(result, insight=insight)
