"""Attention by our Triton kernels, on GPUs. Nothing waits for the device.

What is launched for a decode step follows from its batch size alone, never from lengths, so a step can be recorded once
and replayed with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.gpu_layers import GpuLayer, gpu_layers
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.kernels.gpu.decode_attention import (
    FEW_REQUESTS,
    Launch,
    decode_attention,
    decode_workspace,
    launch_for,
    num_splits,
)
from diptych.kernels.gpu.extend_attention import extend_attention

LARGEST_BATCH: Final = 4096  # requests of a decode step, unless the pool has more pages
INTERPRETER_SMS: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """Some requests of a step that follow each other."""

    page_table: Tensor  # int32 [num_requests, max_pages]
    seq_lens: Tensor  # int32 [num_requests]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The first requests have one new token each; of the others the new tokens start at `starts`. Cut once a step."""

    batch: StagedBatch
    num_single: int
    single: _Requests
    others: _Requests
    starts: Tensor  # int32 [batch_size - num_single + 1], from the first of their tokens on
    max_extend_len: int

    @staticmethod
    def of(batch: StagedBatch, num_single: int, max_extend_len: int) -> _Step:
        single, others = (
            _Requests(batch.page_table[part], batch.seq_lens[part])
            for part in (slice(num_single), slice(num_single, None))
        )
        return _Step(batch, num_single, single, others, batch.extend_starts[num_single:] - num_single, max_extend_len)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How decode steps are launched, and into how many shares they are cut: as many as run at once."""

    launch: Launch
    num_splits: int

    @staticmethod
    def of(batch: int, config: ModelConfig, kv: Tensor) -> _Sharing:
        launch = launch_for(config.head_dim, kv.dtype, config.num_heads // config.num_kv_heads, batch)
        num_sms = torch.cuda.get_device_properties(kv.device).multi_processor_count if kv.is_cuda else INTERPRETER_SMS
        longest = min(config.context_len, kv.shape[0] * kv.shape[3])
        shares = num_splits(batch, config.num_kv_heads, longest, num_sms, launch.programs_per_sm, launch.block)
        return _Sharing(launch, shares)


class TritonAttention:
    """`GraphAttention` on `kv[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, kv: Tensor, sinks: Tensor | None = None) -> None:
        """`sinks`: see `new_sinks`."""
        self._config = config
        self._layers = gpu_layers(config, kv, sinks)
        self._few, self._many = (_Sharing.of(batch, config, kv) for batch in (FEW_REQUESTS, LARGEST_BATCH))
        heads, batch = (config.num_heads, config.num_kv_heads, config.head_dim), max(LARGEST_BATCH, len(kv))
        most = max(self._few.num_splits, self._many.num_splits)
        self._workspace = decode_workspace(batch, *heads, most, kv.device)
        self._step: _Step | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        lens = batch.host.extend_lens
        num_single = int(np.append(lens != 1, True).argmax())
        self._step = _Step.of(batch, num_single, int(lens.max()))

    def capture_metadata(self, batch: StagedBatch) -> None:
        self._step = _Step.of(batch, len(batch.seq_lens), 1)

    def replay_metadata(self, batch: StagedBatch) -> None:
        """The kernels read all that they need from the recorded tensors."""

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """In a mixed step requests that continue are those of a decode step: none has to wait for one program."""
        step, at = self._current(), self._layers[layer]
        queries, single = at.rotate_and_store(qkv, step.batch), step.num_single
        attended = out.view(queries.shape)
        if single:
            self._attend_singly(at, queries[:single], attended[:single], step.single)
        if single < len(step.batch.seq_lens):
            extend_attention(
                queries[single:],
                at.kv,
                step.others.page_table,
                step.others.seq_lens,
                step.starts,
                attended[single:],
                max_extend_len=step.max_extend_len,
                scale=self._config.score_scale,
                window=at.window,
                softcap=self._config.attention_softcap,
                k_scale=at.k_scale,
                v_scale=at.v_scale,
                sinks=at.sinks,
            )

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        step, at = self._current(), self._layers[layer]
        queries = at.rotate_and_store(qkv, step.batch)
        self._attend_singly(at, queries, out.view(queries.shape), step.single)

    def _attend_singly(self, at: GpuLayer, queries: Tensor, out: Tensor, requests: _Requests) -> None:
        """For requests with one new token each."""
        sharing = self._few if len(queries) <= FEW_REQUESTS else self._many
        decode_attention(
            queries,
            at.kv,
            requests.page_table,
            requests.seq_lens,
            out,
            self._workspace,
            scale=self._config.score_scale,
            window=at.window,
            softcap=self._config.attention_softcap,
            k_scale=at.k_scale,
            v_scale=at.v_scale,
            sinks=at.sinks,
            num_splits=sharing.num_splits,
            launch=sharing.launch,
        )

    def _current(self) -> _Step:
        assert self._step is not None, "no step was prepared"
        return self._step
