"""Attention by our Triton kernels, on GPUs. Nothing waits for the device.

What is launched for a decode step follows from its batch size alone, never from lengths, so a step can be recorded once
and replayed with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import LatentHeads
from diptych.engine.attention.gpu_layers import gpu_layers
from diptych.engine.attention.hopper_prompts import PromptStep
from diptych.engine.attention.latent_prompts import LatentPrompts
from diptych.engine.attention.layer_constants import Ropes
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.triton_kernels import AttentionKernels, Chunks, Requests
from diptych.kernels.row_groups import RowGroups


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The first requests have one new token each. Cut once a step."""

    batch: StagedBatch
    num_single: int
    single: Requests
    others: Chunks

    @staticmethod
    def of(
        batch: StagedBatch,
        num_single: int,
        max_extend_len: int,
        prompts: PromptStep | None = None,
        seen_ends: Tensor | None = None,
    ) -> _Step:
        single = Requests(batch.page_table[:num_single], batch.seq_lens[:num_single], _groups_of(batch, num_single))
        others = Requests(batch.page_table[num_single:], batch.seq_lens[num_single:])
        starts = batch.extend_starts[num_single:] - num_single
        longest = int(batch.host.seq_lens[num_single:].max(initial=0))
        return _Step(batch, num_single, single, Chunks(others, starts, max_extend_len, longest, prompts, seen_ends))


def _groups_of(batch: StagedBatch, num_single: int) -> RowGroups | None:
    groups = batch.row_groups
    return groups and RowGroups(groups.firsts[:num_single], groups.counts[:num_single])


def _seen_ends(batch: StagedBatch, num_single: int) -> Tensor:
    """Return those of all tokens but the first, on the device. A row of one token that is an image's is its last."""
    ends = torch.from_numpy(batch.host.seen_ends[num_single:].astype(np.int32))
    device = batch.positions.device
    return ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends


class TritonAttention:
    """`GraphAttention` on `kv[num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]`."""

    def __init__(
        self,
        config: ModelConfig,
        kv: Tensor,
        kernels: AttentionKernels,
        sinks: Tensor | None = None,
        ropes: Ropes | None = None,
        prompts: LatentPrompts | None = None,
    ) -> None:
        """`sinks`: see `new_sinks`; `ropes`: see `rope_tables`; `prompts`: of latents, decompressed where it pays."""
        self._layers = gpu_layers(config, kv, sinks, ropes)
        self._kernels = kernels
        self._prompts = prompts
        self._looks_ahead = config.sees_images_whole
        self._num_positions = min(len(at.rope) for at in self._layers)
        self._step: _Step | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        """Kernels read tables at positions without asking, so a request longer than its pool is an error here."""
        lens, longest = batch.host.extend_lens, int(batch.host.seq_lens.max())
        assert longest <= self._num_positions, f"{longest} tokens, but the pool is for {self._num_positions}"
        num_single = int(np.append(lens != 1, True).argmax())
        if self._looks_ahead and (batch.host.images or batch.host.looks_ahead):
            self._step = _Step.of(batch, num_single, int(lens.max()), seen_ends=_seen_ends(batch, num_single))
            return
        prompts = self._kernels.plan(lens[num_single:], batch.host.seq_lens[num_single:])
        self._step = _Step.of(batch, num_single, int(lens.max()), prompts)

    def capture_metadata(self, batch: StagedBatch) -> None:
        self._step = _Step.of(batch, len(batch.seq_lens), 1)

    def replay_metadata(self, batch: StagedBatch) -> None:
        """The kernels read all that they need from the recorded tensors."""

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """In a mixed step requests that continue are those of a decode step: none has to wait for one program."""
        step, at = self._current(), self._layers[layer]
        queries, single = at.rotate_and_store(qkv, step.batch), step.num_single
        attended = out.view(*queries.shape[:2], -1)
        if single:
            self._kernels.decode(at, queries[:single], attended[:single], step.single)
        if single < len(step.batch.seq_lens):
            self._kernels.extend(at, queries[single:], attended[single:], step.others)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        step, at = self._current(), self._layers[layer]
        queries = at.rotate_and_store(qkv, step.batch)
        self._kernels.decode(at, queries, out.view(*queries.shape[:2], -1), step.single)

    @property
    def decompresses(self) -> bool:
        """See `DecompressingAttention`. Not beside requests that continue: a step has one way for all."""
        step, prompts = self._step, self._prompts
        return prompts is not None and step is not None and not step.num_single and prompts.pay(step.batch)

    def forward_decompressed(self, qkv: Tensor, layer: int, out: Tensor, heads: LatentHeads) -> None:
        """See `DecompressingAttention`."""
        step, at = self._current(), self._layers[layer]
        assert self._prompts is not None
        queries = at.rotate_and_store(qkv, step.batch)
        self._prompts.attend(at.kv, at.k_scale, queries, out, step.batch, heads)

    def _current(self) -> _Step:
        assert self._step is not None, "no step was prepared"
        return self._step
