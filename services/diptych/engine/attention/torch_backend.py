"""Attention in plain torch: gather the pages, then scaled-dot-product attention. The reference, for any dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.config import ModelConfig, Rope
from diptych.engine.attention.layer_constants import Ropes, kv_scales, rope_tables
from diptych.engine.attention.staged_batch import StagedBatch, single_rows, stage
from diptych.engine.values.batch import ForwardBatch, ForwardMode

FP8_LARGEST: Final = 448.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What the new tokens of a request see, together: nothing before it is read, for it may be garbage."""

    pages: Tensor  # [num_pages]
    keys: slice  # of their tokens
    mask: Tensor | None  # [num_new_tokens, num_keys], True: attend; None: the causal triangle


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of an extend step."""

    start: int  # of its rows in the batch
    end: int
    sights: dict[int, Sight]  # by window


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the layers of a step share."""

    ropes: dict[Rope, Tensor]  # [2, num_tokens, 1, rope_dim / 2]: cosines and sines
    out_pages: Tensor  # [num_tokens]
    out_offsets: Tensor  # [num_tokens]
    spans: tuple[Span, ...]  # of an extend or mixed step
    page_table: Tensor  # [batch_size, max_pages], of a decode step
    masks: dict[int, Tensor]  # by window: [batch_size, max_pages * page_size], what a layer sees, of a decode step


class TorchAttention:
    """`AttentionBackend` on `kv[num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]`."""

    def __init__(
        self,
        config: ModelConfig,
        kv: Tensor,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
        ropes: Ropes | None = None,
    ) -> None:
        """`sinks`: see `new_sinks`; `ropes`: see `rope_tables`."""
        self._config = config
        self._sinks = sinks
        self._dtype = dtype  # of states; the pool's may be narrower
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._kv = kv
        self._bytes = kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv  # torch does not index FP8
        self._page_size = kv.shape[3]
        scales = torch.tensor(kv_scales(config, kv.dtype), device=kv.device)[:, : config.num_planes]
        self._scales = scales[:, :, None, None]  # of FP8
        ropes = rope_tables(config, kv) if ropes is None else ropes
        self._ropes = {rope: ropes[rope] for rope in map(config.rope_of, range(config.num_layers))}
        self._windows = {config.window(layer) for layer in range(config.num_layers)}
        self._sees_all = config.pooling is not None and config.pooling.sees_all  # each step has whole prompts then
        self._looks_ahead = config.sees_images_whole
        self._metadata: Metadata | None = None

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        if (rows := single_rows(batch.host)) is not batch.host:
            batch = stage(rows, self._kv.device)
        seq_lens, table = batch.seq_lens[:, None], batch.page_table.long()
        places = torch.arange(table.shape[1] * self._page_size, device=table.device)
        in_use = places < seq_lens
        firsts = {each: first_key(seq_lens - 1, each, chunked=self._config.chunked) for each in self._windows}
        self._metadata = Metadata(
            ropes={rope: turns(angles[batch.positions], self._dtype) for rope, angles in self._ropes.items()},
            out_pages=batch.out_slots // self._page_size,
            out_offsets=batch.out_slots % self._page_size,
            spans=self._spans(batch.host, table) if batch.host.mode is not ForwardMode.DECODE else (),
            page_table=table,
            masks={each: in_use & (places >= first) for each, first in firsts.items()},
        )

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        queries, metadata = self._rotate_and_store(qkv, layer)
        attended = torch.cat([self._extend(queries, span, layer) for span in metadata.spans])
        out.copy_(attended.reshape(out.shape))

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        queries, metadata = self._rotate_and_store(qkv, layer)
        out.copy_(self._decode(queries, metadata, layer).reshape(out.shape))

    def _rotate_and_store(self, qkv: Tensor, layer: int) -> tuple[Tensor, Metadata]:
        """Return the rotated queries, `[num_tokens, num_heads, head_dim]`."""
        assert self._metadata is not None
        num_tokens, heads, kv_heads = qkv.shape[0], self._num_heads, self._num_kv_heads
        states, rope = qkv.view(num_tokens, -1, self._head_dim), self._config.rope_of(layer)
        rotate(states[:, : heads + kv_heads, rope.start :], *self._metadata.ropes[rope])
        if self._config.keeps(layer):
            new_kv = states[:, heads:].view(num_tokens, -1, kv_heads, self._head_dim)
            self._store(new_kv, layer, self._metadata)
        return states[:, :heads], self._metadata

    def _store(self, new_kv: Tensor, layer: int, metadata: Metadata) -> None:
        if self._kv.dtype == torch.float8_e4m3fn:
            scaled = new_kv.float() / self._scales[layer]
            new_kv = scaled.clamp(-FP8_LARGEST, FP8_LARGEST)  # torch makes NaN of what is larger
        stored = new_kv.to(self._kv.dtype).view(self._bytes.dtype)
        self._bytes[metadata.out_pages, self._config.place(layer), :, metadata.out_offsets] = stored

    def _load(self, pages: Tensor, layer: int) -> Tensor:
        """Return `[..., num_planes, page_size, num_kv_heads, head_dim]` for page numbers of any shape."""
        stored = self._bytes[pages, self._config.place(layer)].view(self._kv.dtype)
        if not self._config.kv_scales:
            return stored.to(self._dtype)
        return (stored.float() * self._scales[layer, :, :, :, None]).to(self._dtype)

    def _spans(self, batch: ForwardBatch, table: Tensor) -> tuple[Span, ...]:
        ends = batch.extend_lens.cumsum().tolist()
        lens = zip(batch.extend_lens.tolist(), batch.seq_lens.tolist(), strict=True)
        ahead = self._looks_ahead and bool(batch.images)
        seen_ends = torch.from_numpy(batch.seen_ends) if ahead else torch.empty(0, dtype=torch.int64)
        return tuple(
            Span(
                start=end - extend_len,
                end=end,
                sights={
                    each: self._sight(table[row], extend_len, seq_len, each, seen_ends[end - extend_len : end])
                    for each in self._windows
                },
            )
            for row, (end, (extend_len, seq_len)) in enumerate(zip(ends, lens, strict=True))
        )

    def _sight(self, pages: Tensor, extend_len: int, seq_len: int, window: int, seen_ends: Tensor) -> Sight:
        """`seen_ends`: of the new tokens, see `ForwardBatch`; empty: none sees what is behind itself."""
        positions, page_size = torch.arange(seq_len - extend_len, seq_len), self._page_size
        if self._sees_all:
            return Sight(pages[: -(-seq_len // page_size)], slice(0, seq_len), self._both_sides(positions, window))
        firsts = first_key(positions, window, chunked=self._config.chunked).clamp(min=0)
        first = int(firsts[0])
        start = first // page_size * page_size
        seen, keys = pages[start // page_size : -(-seq_len // page_size)], slice(first - start, seq_len - start)
        if not firsts.any() and seq_len == extend_len and not len(seen_ends):
            return Sight(seen, keys, None)
        places = torch.arange(first, seq_len)
        ends = seen_ends if len(seen_ends) else positions + 1
        mask = (places < ends[:, None]) & (places >= firsts[:, None])
        return Sight(seen, keys, mask.to(self._kv.device))

    def _both_sides(self, positions: Tensor, window: int) -> Tensor:
        """Return what the tokens of a whole prompt see in front of them and behind."""
        distances = (positions[:, None] - positions).abs()
        return (distances < (window or len(positions))).to(self._kv.device)

    def _extend(self, queries: Tensor, span: Span, layer: int) -> Tensor:
        """Return `[num_new_tokens, num_heads, value_dim]` of one request."""
        sight = span.sights[self._config.window(layer)]
        pages = self._load(sight.pages, layer)  # [num_pages, num_planes, page_size, num_kv_heads, head_dim]
        keys, values = self._planes(pages.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, None, :, sight.keys])
        mine = queries[span.start : span.end].transpose(0, 1)[None]
        return self._weigh(mine, keys, values, sight.mask, layer)[0].transpose(0, 1)

    def _decode(self, queries: Tensor, metadata: Metadata, layer: int) -> Tensor:
        """Return `[batch_size, num_heads, 1, value_dim]`. Shorter requests are padded to the longest."""
        pages = self._load(metadata.page_table, layer)  # [batch_size, max_pages, num_planes, page_size, ...]
        keys, values = self._planes(pages.permute(2, 0, 4, 1, 3, 5).flatten(3, 4))
        mask = metadata.masks[self._config.window(layer)]
        unseen = ~mask[:, None, :, None]  # their weight is 0, but 0 * garbage may be NaN
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        return self._weigh(queries[:, :, None], keys, values, mask[:, None, None], layer)

    def _planes(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `[num_planes, ..., head_dim]`: of one plane both."""
        return kept[0], kept[-1][..., : self._config.value_dim]

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: int) -> Tensor:
        """Attend `[batch_size, num_heads, num_queries, head_dim]` to `[batch_size, num_kv_heads, num_keys, ...]`."""
        scale, softcap = self._config.score_scale, self._config.attention_softcap
        if not softcap and self._sinks is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        group = self._num_heads // self._num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        products = queries @ keys.transpose(2, 3)
        scores = softcap * torch.tanh(products * (scale / softcap)) if softcap else products * scale
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
        return self._shares(scores.masked_fill(~seen, -torch.inf), layer).to(values.dtype) @ values

    def _shares(self, scores: Tensor, layer: int) -> Tensor:
        """Return the softmax of `[batch_size, num_heads, num_queries, num_keys]`, float32, in which sinks take part."""
        if self._sinks is None:
            return scores.softmax(dim=-1, dtype=torch.float32)
        sinks = self._sinks[layer, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def first_key(positions: Tensor, window: int, *, chunked: bool) -> Tensor:
    """Return the first key that a token sees, of any shape; 0 or less: all."""
    if not window:
        return torch.zeros_like(positions)
    return positions // window * window if chunked else positions + 1 - window


def turns(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a table of `rope_tables` as `[2, num_tokens, 1, rope_dim / 2]`: cosines and sines."""
    return angles.to(dtype).transpose(0, 1)[:, :, None]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first dimensions of `[num_tokens, num_heads, head_dim]` in place."""
    first, second = states[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
    rotated = second * cos + first * sin
    first.copy_(first * cos - second * sin)
    second.copy_(rotated)
