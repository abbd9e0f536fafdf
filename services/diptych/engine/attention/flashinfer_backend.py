"""Attention by FlashInfer, on GPUs, where it is installed (`diptych[flashinfer]`); written for 0.6.7.

It reads the pages of a layer where they are: keys and values are strided views of the pool. How a step is shared out is
planned on the host, once a step and kind of window, because layers differ in nothing else. A plan leaves the host by an
asynchronous copy; the next one waits until that has been made, which it has when the step before the last is over.
"""

from __future__ import annotations

from typing import Any, Final

import flashinfer
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.gpu_layers import GpuLayer, gpu_layers
from diptych.engine.attention.page_lists import page_lists
from diptych.engine.attention.staged_batch import StagedBatch, extend_starts

WORKSPACE_NBYTES: Final = 256 << 20  # for partial results; steps run one after the other, so all plans share it
LAYOUT: Final = "NHD"  # of a page: tokens, then heads
TENSOR_CORE_GROUP: Final = 4  # heads a KV head from which tensor cores pay in decode steps

Wrapper = Any  # the library has no types
Wrappers = dict[int, Wrapper]  # by window


class FlashInferAttention:
    """`GraphAttention` on `kv[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, kv: Tensor, dtype: torch.dtype) -> None:
        self._config = config
        self._kv = kv
        self._dtype = dtype  # of states
        self._layers = gpu_layers(config, kv)
        self._windows = {layer.window for layer in self._layers}
        self._workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=kv.device)
        self._extend = {window: self._new_extend() for window in self._windows}
        self._decode = {window: self._new_decode() for window in self._windows}
        self._recorded: dict[int, Wrappers] = {}  # by batch size: graphs keep the addresses of their plans
        self._running: Wrappers = self._extend
        self._batch: StagedBatch | None = None
        self._plan_left = torch.cuda.Event()

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        if len(batch.positions) == len(batch.seq_lens):
            self._plan(self._decode, batch)
        else:
            self._plan(self._extend, batch, torch.from_numpy(extend_starts(batch.host)), causal=True)

    def capture_metadata(self, batch: StagedBatch) -> None:
        num_rows, width = batch.page_table.shape
        recorded = {window: self._new_recordable(num_rows, width) for window in self._windows}
        self._recorded[num_rows] = recorded
        self.replay_metadata(batch)

    def replay_metadata(self, batch: StagedBatch) -> None:
        self._plan(self._recorded[len(batch.seq_lens)], batch)

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._attend(self._layers[layer], qkv, out)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._attend(self._layers[layer], qkv, out)

    def _attend(self, layer: GpuLayer, qkv: Tensor, out: Tensor) -> None:
        assert self._batch is not None, "no step was prepared"
        queries = layer.rotate_and_store(qkv, self._batch)
        pages = layer.kv[:, 0], layer.kv[:, 1]
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self._config.kv_scales else {}
        self._running[layer.window].run(queries, pages, out=out.view(queries.shape), **scales)

    def _plan(self, wrappers: Wrappers, batch: StagedBatch, *starts: Tensor, **mask: bool) -> None:
        self._running, self._batch = wrappers, batch
        self._plan_left.synchronize()
        for window, wrapper in wrappers.items():
            wrapper.plan(*starts, *self._pages(batch), **mask, **self._constants(window))
        self._plan_left.record()

    def _pages(self, batch: StagedBatch) -> tuple[Any, ...]:
        """Return what plans want to know of pages and heads, in their order. On the host: a plan would wait for it."""
        config, page_size = self._config, self._kv.shape[3]
        arrays = map(torch.from_numpy, page_lists(batch.host.page_table, batch.host.seq_lens, page_size))
        return (*arrays, config.num_heads, config.num_kv_heads, config.head_dim, page_size)

    def _constants(self, window: int) -> dict[str, Any]:
        return {
            "sm_scale": self._config.score_scale,
            "window_left": window - 1,  # a token's own place does not count; -1: all
            "logits_soft_cap": self._config.attention_softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._kv.dtype,
        }

    def _new_extend(self) -> Wrapper:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)

    def _new_decode(self, **graph: Any) -> Wrapper:
        group = self._config.num_heads // self._config.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=group >= TENSOR_CORE_GROUP, **graph
        )

    def _new_recordable(self, num_rows: int, width: int) -> Wrapper:
        """`width`: pages of a request, at most."""
        starts, indices, lens = (
            torch.zeros(size, dtype=torch.int32, device=self._kv.device)
            for size in (num_rows + 1, num_rows * width, num_rows)
        )
        return self._new_decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=lens,
        )
