"""Sparse attention to latents by our Triton kernels, on GPUs: an indexer chooses the tokens that a query attends to.

Each new token is a row of its own, in decode steps and in prompts alike. What is launched for a decode step follows
from its batch size alone, never from lengths, so a step can be recorded once and replayed with others. Nothing waits
for the device. `sparse_attention.py` has the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.gpu_layers import gpu_layers
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.triton_kernels import DTYPES, latent_shapes, longest_request, num_sms
from diptych.engine.values.batch import ForwardMode
from diptych.kernels.gpu.attention.choose_tokens import choose_tokens
from diptych.kernels.gpu.attention.index_scores import MAX_ROWS, IndexRows, IndexShape, index_programs, index_scores
from diptych.kernels.gpu.attention.rope_store import rope_store
from diptych.kernels.gpu.attention.sparse_latent_attention import (
    SparseWorkspace,
    most_parts,
    parts_of_rows,
    sparse_latent_attention,
)

SCORES: Final = 1 << 25  # of as many rows at a time as fit: 128 MiB
SCORES_ALIGNED: Final = 64  # scores of a row are a multiple


class TokenChoice:
    """What an indexer has on a GPU: it stores index keys, and chooses for rows of new tokens."""

    def __init__(self, config: ModelConfig, index_keys: Tensor, ropes: list[Tensor]) -> None:
        """`index_keys`: `[num_pages, num_layers, 1, page_size, 1, index_head_dim]`, of the layers that choose.

        `ropes`: the tables of all layers.
        """
        assert config.indexer is not None
        self.indexer = indexer = config.indexer
        self._ropes = ropes
        self._layers = dict(zip(indexer.layers, index_keys.unbind(1), strict=True))
        self._page_size, heads = index_keys.shape[3], (indexer.num_heads, indexer.head_dim, indexer.num_kept)
        self._shapes = {dtype: IndexShape(*heads, self._page_size, dtype, index_keys.dtype) for dtype in DTYPES}
        width = -(-longest_request(config, index_keys) // SCORES_ALIGNED) * SCORES_ALIGNED
        self._scores = torch.empty(max(1, min(MAX_ROWS, SCORES // width)), width, device=index_keys.device)
        self._num_sms = num_sms(index_keys)

    def chooses(self, layer: int) -> bool:
        return layer in self._layers

    def choose(self, index: Tensor, layer: int, batch: StagedBatch, rows: IndexRows, chosen: Tensor) -> None:
        """Store the layer's index keys, and fill `chosen`, see `choose_tokens`. Index queries are rotated in place.

        `index`: `[num_tokens, Indexer.size]`, with any stride between tokens.
        """
        num_heads, dim, keys = self.indexer.num_heads, self.indexer.head_dim, self._layers[layer]
        states = index[:, : (num_heads + 1) * dim]
        heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": dim}
        rope_store(states, batch.positions, batch.out_slots, self._ropes[layer], keys, **heads)
        most, width = self._scores.shape
        programs = index_programs(most, width, self._num_sms)
        for part in _slices(len(chosen), most):
            own, shape = rows.part(part), self._shapes[index.dtype]
            index_scores(index[part], keys, own, self._scores, shape, num_programs=programs)
            choose_tokens(self._scores, own, chosen[part], page_size=self._page_size)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What the layers of a step share."""

    batch: StagedBatch
    rows: IndexRows
    chosen: Tensor  # int32 [num_rows, num_kept], slots; what the last layer that chose left there


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    """What decode steps of up to so many rows share. Graphs keep the addresses."""

    requests: Tensor  # int32 [num_rows]: row i is of request i
    chosen: Tensor  # int32 [num_rows, num_kept]


class TritonSparseAttention:
    """`GraphAttention` on two views of a pool, see `region_views`: of latents, and of index keys."""

    def __init__(self, config: ModelConfig, kv: Tensor, index_keys: Tensor) -> None:
        self._config = config
        self._layers = gpu_layers(config, kv)
        self._choice = TokenChoice(config, index_keys, [layer.rope for layer in self._layers])
        self._shapes = latent_shapes(config, kv)
        self._num_sms = num_sms(kv)
        most = max(most_parts(shape, self._num_sms) for shape in self._shapes.values())
        self._workspace = SparseWorkspace.allocate(self._shapes[torch.float32], most, kv.device)
        self._decode_rows: list[_DecodeRows] = []  # each of more rows than the one before
        self._step: _Step | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        if batch.host.mode is ForwardMode.DECODE:
            self.capture_metadata(batch)
            return
        num_tokens = len(batch.positions)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.positions.device)
        requests = torch.searchsorted(batch.extend_starts, tokens, right=True, out_int32=True) - 1
        rows = IndexRows(batch.page_table, requests, (batch.positions + 1).to(torch.int32))
        chosen = tokens.new_empty(num_tokens, self._choice.indexer.num_kept)
        self._step = _Step(batch, rows, chosen)

    def capture_metadata(self, batch: StagedBatch) -> None:
        num_rows = len(batch.seq_lens)
        room = self._room(num_rows)
        rows = IndexRows(batch.page_table, room.requests[:num_rows], batch.seq_lens)
        self._step = _Step(batch, rows, room.chosen[:num_rows])

    def replay_metadata(self, batch: StagedBatch) -> None:
        """The kernels read all that they need from the recorded tensors."""

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """In a mixed step requests that continue are rows as others are: none of them attends to many tokens."""
        self._attend_to_chosen(qkv, layer, out, num_parts=1)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        num_kept = self._choice.indexer.num_kept
        num_parts = parts_of_rows(self._shapes[qkv.dtype], len(qkv), num_kept, self._num_sms)
        self._attend_to_chosen(qkv, layer, out, num_parts)

    def _attend_to_chosen(self, qkv: Tensor, layer: int, out: Tensor, num_parts: int) -> None:
        step, at = self._step, self._layers[layer]
        assert step is not None, "no step was prepared"
        states, index = qkv[:, : self._config.states_size], qkv[:, self._config.states_size :]
        if self._choice.chooses(layer):
            self._choice.choose(index, layer, step.batch, step.rows, step.chosen)
        num_states = self._config.num_heads + at.num_kept  # one that borrows stores nothing
        queries = at.rotate_and_store(states[:, : num_states * self._config.head_dim], step.batch)
        sparse_latent_attention(
            queries,
            at.kv,
            step.chosen,
            step.rows.lens,
            out.view(*queries.shape[:2], -1),
            self._workspace,
            self._shapes[qkv.dtype],
            scale=self._config.score_scale,
            kv_scale=at.k_scale,
            num_parts=num_parts,
        )

    def _room(self, num_rows: int) -> _DecodeRows:
        """Return room for so many rows, or for more."""
        if not self._decode_rows or len(self._decode_rows[-1].requests) < num_rows:
            requests = torch.arange(num_rows, dtype=torch.int32, device=self._workspace.sums.device)
            chosen = requests.new_empty(num_rows, self._choice.indexer.num_kept)
            self._decode_rows.append(_DecodeRows(requests, chosen))
        return self._decode_rows[-1]


def _slices(size: int, most: int) -> Iterator[slice]:
    return (slice(first, min(first + most, size)) for first in range(0, size, most))
