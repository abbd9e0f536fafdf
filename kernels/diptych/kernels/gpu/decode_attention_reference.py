"""What `decode_attention.py` computes, in plain torch and in any precision, a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return `[batch, num_heads, head_dim]` of `dtype`, which is also what it is computed in."""
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    bytes_ = kv_layer.view(torch.uint8) if kv_layer.dtype == torch.float8_e4m3fn else kv_layer  # torch indexes no FP8
    group, page_size = q.shape[1] // kv_layer.shape[3], kv_layer.shape[2]
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request, : -(-seq_len // page_size)].long()
        kv = bytes_[pages].view(kv_layer.dtype).to(dtype)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
        keys, values = kv.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :seq_len].repeat_interleave(group, dim=1)
        seen = slice(max(0, seq_len - window) if window else 0, seq_len)
        scores = (keys[:, seen] @ q[request, :, :, None].to(dtype))[..., 0] * (scale * k_scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if seq_len:
            out[request] = (scores.softmax(dim=-1)[:, None] @ values[:, seen])[:, 0] * v_scale
    return out
