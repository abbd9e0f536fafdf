"""Attention in plain torch: gather the pages, then scaled-dot-product attention. The reference, for any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.engine.attention.rope import rope_table
from diptych.engine.batch import ForwardBatch, ForwardMode
from diptych.engine.loader.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of an extend step."""

    start: int  # of its rows in the batch
    end: int
    pages: Tensor  # [num_pages]
    seq_len: int
    mask: Tensor | None  # [end - start, seq_len], True: attend; None: the plain causal triangle


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the layers of a step share."""

    cos: Tensor  # [num_tokens, 1, head_dim / 2]
    sin: Tensor
    out_pages: Tensor  # [num_tokens]
    out_offsets: Tensor  # [num_tokens]
    spans: tuple[Span, ...]  # of an extend step
    page_table: Tensor  # [batch_size, max_pages], of a decode step
    mask: Tensor  # [batch_size, 1, 1, max_pages * page_size], of a decode step


class TorchAttention:
    """`AttentionBackend` on `kv[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._kv = kv
        self._page_size = kv.shape[3]
        self._rope = rope_table(config.rope, config.context_len)
        self._metadata: Metadata | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        slots = torch.from_numpy(batch.out_slots)
        cos, sin = self._rope[torch.from_numpy(batch.positions)].to(self._kv.dtype).unbind(1)
        table = torch.from_numpy(batch.page_table).long()
        width = table.shape[1] * self._page_size
        in_use = torch.arange(width) < torch.from_numpy(batch.seq_lens)[:, None]
        self._metadata = Metadata(
            cos=cos[:, None],
            sin=sin[:, None],
            out_pages=slots // self._page_size,
            out_offsets=slots % self._page_size,
            spans=self._spans(batch, table) if batch.mode is ForwardMode.EXTEND else (),
            page_table=table,
            mask=in_use[:, None, None, :],
        )

    def attend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        assert self._metadata is not None
        num_tokens, heads, kv_heads = qkv.shape[0], self._num_heads, self._num_kv_heads
        states = qkv.view(num_tokens, heads + 2 * kv_heads, self._head_dim)
        self._rotate(states[:, : heads + kv_heads], self._metadata)
        new_kv = states[:, heads:].view(num_tokens, 2, kv_heads, self._head_dim)
        self._kv[self._metadata.out_pages, layer, :, self._metadata.out_offsets] = new_kv
        queries = states[:, :heads]
        if self._metadata.spans:
            attended = torch.cat([self._extend(queries, span, layer) for span in self._metadata.spans])
        else:
            attended = self._decode(queries, self._metadata, layer)
        out.copy_(attended.reshape(out.shape))

    def _spans(self, batch: ForwardBatch, table: Tensor) -> tuple[Span, ...]:
        ends = batch.extend_lens.cumsum().tolist()
        lens = zip(batch.extend_lens.tolist(), batch.seq_lens.tolist(), strict=True)
        return tuple(
            Span(
                start=end - extend_len,
                end=end,
                pages=table[row, : -(-seq_len // self._page_size)],
                seq_len=seq_len,
                mask=_causal_mask(extend_len, seq_len) if seq_len > extend_len else None,
            )
            for row, (end, (extend_len, seq_len)) in enumerate(zip(ends, lens, strict=True))
        )

    @staticmethod
    def _rotate(states: Tensor, metadata: Metadata) -> None:
        """Rotate `[num_tokens, num_heads, head_dim]` in place."""
        first, second = states.chunk(2, dim=-1)
        rotated = second * metadata.cos + first * metadata.sin
        first.copy_(first * metadata.cos - second * metadata.sin)
        second.copy_(rotated)

    def _extend(self, queries: Tensor, span: Span, layer: int) -> Tensor:
        """Return `[num_new_tokens, num_heads, head_dim]` of one request."""
        keys, values = self._kv[span.pages, layer].transpose(0, 1).flatten(1, 2)[:, : span.seq_len]
        return F.scaled_dot_product_attention(
            queries[span.start : span.end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=span.mask,
            is_causal=span.mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)

    def _decode(self, queries: Tensor, metadata: Metadata, layer: int) -> Tensor:
        """Return `[batch_size, num_heads, 1, head_dim]`. Shorter requests are padded to the longest."""
        pages = self._kv[metadata.page_table, layer]  # [batch_size, max_pages, 2, page_size, num_kv_heads, head_dim]
        keys, values = pages.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
        unused = ~metadata.mask.transpose(2, 3)  # their weight is 0, but 0 * garbage may be NaN
        keys, values = keys.masked_fill(unused, 0), values.masked_fill(unused, 0)
        return F.scaled_dot_product_attention(
            queries[:, :, None], keys, values, attn_mask=metadata.mask, enable_gqa=True
        )


def _causal_mask(extend_len: int, seq_len: int) -> Tensor:
    return torch.ones(extend_len, seq_len, dtype=torch.bool).tril(diagonal=seq_len - extend_len)
