"""Runs a batch on the model: the engine's `Runner` on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.attention.registry import choose
from diptych.engine.batch import ForwardBatch, OnLayer, SamplingBatch, StepResult
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.source import ModelSource
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.lora import Loras
from diptych.engine.models.weights import load
from diptych.engine.quantization.weight import expanded
from diptych.engine.runner.kv_pool import DTYPES
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.sampling import sample_step
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.kvtransfer.layout import PoolLayout


class ModelRunner:
    """Loads a model onto a KV pool. One thread at a time may call it."""

    def __init__(
        self,
        source: ModelSource,
        kv: Tensor,
        *,
        dtype: str,
        quantization: str = "auto",
        attention_backend: str = "auto",
        num_threads: int = 1,
        max_loras: int = 0,
        communicator: Communicator | None = None,
        layer_listener: Callable[[], OnLayer | None] = lambda: None,
    ) -> None:
        """With a `communicator` load one rank's part; `kv` is then the pool of that part.

        `layer_listener` is asked before each step who is to hear of its layers.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported; {' and '.join(DTYPES)} are")
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            part = ModelPart.of(source, communicator)
            backend = choose(attention_backend, part.config, kv, DTYPES[dtype], num_threads)
            ops = part.wrap(backend.ops)
            tensors = part.tensors if quantization == "auto" else expanded(part.tensors)
            weights = load(part.config, part.placement, tensors, ops, DTYPES[dtype])
            self._layer_listener = layer_listener
            self._attention, self._sampler = backend.attention, backend.sampler
            self.loras = Loras(part.config.num_layers, max_loras, backend.low_rank, DTYPES[dtype])
            self._model = Decoder(part.config, weights.wrapped(self.loras.wrap), ops, DTYPES[dtype])

    @staticmethod
    def pool_layout(config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> PoolLayout:
        """Return the layout of a pool for this model."""
        return PoolLayout(
            num_pages=num_pages,
            num_layers=config.num_layers,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        """Write the batch's KV and sample."""
        return self.sample(batch, self.logits(batch), sampling)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's KV; return the logits of the rows to sample from, and then of the prompt rows."""
        with torch.inference_mode():
            self._attention.init_forward_metadata(batch)
            rows = (np.cumsum(batch.extend_lens) - 1)[batch.sample_rows]
            if batch.prompt_rows is not None:
                rows = np.concatenate([rows, batch.prompt_rows.token_rows])
            self.loras.begin(batch.adapters, batch.extend_lens, rows)
            input_ids, logits_rows = torch.from_numpy(batch.input_ids), torch.from_numpy(rows)
            return self._model.forward(input_ids, logits_rows, self._attention, self._layer_listener())

    def sample(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> StepResult:
        """Choose the batch's next tokens by its logits, which may be overwritten."""
        with torch.inference_mode():
            return sample_step(self._sampler, logits, sampling, batch.prompt_rows)
