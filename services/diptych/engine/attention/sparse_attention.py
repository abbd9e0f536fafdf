"""Sparse attention to latents in plain torch: an indexer chooses the tokens that a query attends to (DeepSeek V3.2).

Rule: a token is computed by itself, in shapes that follow from its position alone. So its bits depend neither on the
batch nor on how its prompt was cut, and of tokens with equal scores the same ones are chosen in any step: the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Rope
from diptych.engine.attention.layer_constants import rope_tables
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.torch_backend import rotate, turns


@dataclass(frozen=True, slots=True)
class _Request:
    """One request's part of a step."""

    start: int  # of its tokens in the batch
    end: int
    pages: Tensor  # [num_pages]
    seq_len: int

    def seen(self) -> Iterator[tuple[int, int]]:
        """Yield each new token, and how many of the request it sees: itself is the last of these."""
        return ((token, self.seq_len - self.end + token + 1) for token in range(self.start, self.end))


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of a step share."""

    ropes: dict[Rope, Tensor]  # [2, num_tokens, 1, rope_dim / 2]: cosines and sines
    out_pages: Tensor  # [num_tokens]
    out_offsets: Tensor  # [num_tokens]
    requests: tuple[_Request, ...]


class SparseAttention:
    """`AttentionBackend` on two views of a pool, see `region_views`: of latents, and of index keys."""

    def __init__(self, config: ModelConfig, kv: Tensor, index_keys: Tensor, dtype: torch.dtype) -> None:
        assert config.indexer is not None
        self._config = config
        self._indexer = config.indexer
        self._kv = kv[:, :, 0, :, 0]  # [num_pages, num_layers, page_size, head_dim]
        self._index_keys = index_keys[:, :, 0, :, 0]  # the same of the layers that choose
        self._places = {layer: place for place, layer in enumerate(config.indexer.layers)}
        self._dtype = dtype  # of states; the pool's may be narrower
        self._ropes = rope_tables(config, kv)
        self._step: _Step | None = None
        self._chosen: list[Tensor | None] = []  # by token, in the layer that chose last; None: all that it sees

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        page_size = self._kv.shape[2]
        self._step = _Step(
            ropes={rope: turns(angles[batch.positions], self._dtype) for rope, angles in self._ropes.items()},
            out_pages=batch.out_slots // page_size,
            out_offsets=batch.out_slots % page_size,
            requests=tuple(_requests(batch, page_size)),
        )

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._attend_to_chosen(qkv, layer, out)

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        self._attend_to_chosen(qkv, layer, out)

    def _attend_to_chosen(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        assert self._step is not None, "no step was prepared"
        states, index = qkv[:, : self._config.states_size], qkv[:, self._config.states_size :]
        if layer in self._places:
            self._choose(index, layer, self._step)
        queries = self._rotate_and_store(states, layer, self._step)
        results = out.view(len(out), self._config.num_heads, self._config.value_dim)
        for request in self._step.requests:
            latents = self._load(self._kv, self._config.place(layer), request)
            for token, num_seen in request.seen():
                chosen = self._chosen[token]
                kept = latents[:num_seen] if chosen is None else latents[chosen]
                results[token] = self._weigh(queries[token].clone(), kept)

    def _rotate_and_store(self, states: Tensor, layer: int, step: _Step) -> Tensor:
        """Return the rotated queries, `[num_tokens, num_heads, head_dim]`."""
        heads, rope = states.view(len(states), -1, self._config.head_dim), self._config.rope_of(layer)
        rotate(heads[..., rope.start :], *step.ropes[rope])
        if self._config.keeps(layer):
            place = self._config.place(layer)
            self._kv[step.out_pages, place, step.out_offsets] = heads[:, -1].to(self._kv.dtype)
        return heads[:, :-1]

    def _choose(self, index: Tensor, layer: int, step: _Step) -> None:
        """Store index keys, and choose for each token. `index`: `[num_tokens, Indexer.size]`."""
        num_heads, dim, place = self._indexer.num_heads, self._indexer.head_dim, self._places[layer]
        heads = index[:, : (num_heads + 1) * dim].view(len(index), -1, dim)
        weights = index[:, (num_heads + 1) * dim :]
        rotate(heads, *step.ropes[self._config.rope_of(layer)])
        self._index_keys[step.out_pages, place, step.out_offsets] = heads[:, -1].to(self._index_keys.dtype)
        self._chosen = [None] * len(index)
        for request in step.requests:
            if request.seq_len <= self._indexer.num_kept:
                continue
            keys = self._load(self._index_keys, place, request).float()
            for token, num_seen in request.seen():
                queries = heads[token, :-1].float().clone()
                self._chosen[token] = self._best(queries, weights[token].float().clone(), keys[:num_seen])

    def _best(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor | None:
        """Return the places of the best of `keys`, ascending; None: all. Scales of scores change no order."""
        if len(keys) <= self._indexer.num_kept:
            return None
        scores = weights @ (queries @ keys.T).relu_()
        return scores.argsort(descending=True, stable=True)[: self._indexer.num_kept].sort().values

    def _load(self, pool: Tensor, place: int, request: _Request) -> Tensor:
        """Return what the pool has of a request, `[seq_len, head_dim]`, in the states' dtype."""
        return pool[request.pages, place].flatten(0, 1)[: request.seq_len].to(self._dtype)

    def _weigh(self, queries: Tensor, kept: Tensor) -> Tensor:
        """Attend `[num_heads, head_dim]` to `[num_kept, head_dim]`; return `[num_heads, value_dim]`."""
        scores = (queries @ kept.T) * self._config.score_scale
        return scores.softmax(dim=-1, dtype=torch.float32).to(kept.dtype) @ kept[:, : self._config.value_dim]


def _requests(batch: StagedBatch, page_size: int) -> Iterator[_Request]:
    start, table = 0, batch.page_table.long()
    lens = zip(batch.host.extend_lens.tolist(), batch.host.seq_lens.tolist(), strict=True)
    for row, (extend_len, seq_len) in enumerate(lens):
        yield _Request(start, start + extend_len, table[row, : -(-seq_len // page_size)], seq_len)
        start += extend_len
