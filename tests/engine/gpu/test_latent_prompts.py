"""Keys and values that are made of latents give what attention to the latents themselves gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from tiny_config import tiny_config
from torch import Tensor

from diptych.architectures.config import Latent, Rope
from diptych.engine.attention.staged_batch import stage
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.models.matrices.matrix import TorchHeadMatrices
from diptych.engine.values.batch import ForwardBatch, ForwardMode

HEADS, RANK, NOPE, ROPE, VALUE, PAGE_SIZE = 5, 32, 24, 16, 20, 4
LATENT: Final = replace(
    tiny_config(
        num_heads=HEADS, num_kv_heads=1, head_dim=RANK + ROPE, rope=Rope(1e4, ROPE, start=RANK), query_scale=0.2
    ),
    latent=Latent(0, RANK, NOPE, ROPE, VALUE, interleaved=True, norm_eps=1e-6),
    context_len=128,
)


class Heads:
    """Those of a layer, with random weights."""

    def __init__(self, device: torch.device) -> None:
        keys, values = torch.randn(HEADS, RANK, NOPE, device=device), torch.randn(HEADS, VALUE, RANK, device=device)
        self._keys, self._values = TorchHeadMatrices(keys), TorchHeadMatrices(values)

    def absorbed(self, nope: Tensor) -> Tensor:
        out = nope.new_empty(*nope.shape[:2], RANK)
        self._keys.multiply(nope, out)
        return out

    def unfolded(self, latents: Tensor) -> Tensor:
        out = latents.new_empty(*latents.shape[:2], VALUE)
        self._values.multiply(latents, out)
        return out

    def keys_of(self, latents: Tensor, out: Tensor) -> None:
        self._keys.spread_back(latents, out)

    def values_of(self, latents: Tensor, out: Tensor) -> None:
        self._values.spread(latents, out)


def batch_of(new_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    """Requests whose pages lie in any order."""
    counts = [-(-seq_len // PAGE_SIZE) for seq_len in seq_lens]
    free, table = iter(np.random.default_rng(0).permutation(np.arange(1, 64))), np.zeros((len(counts), 32), np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [next(free) for _ in range(count)]
    lens = list(zip(new_lens, seq_lens, strict=True))
    positions = [np.arange(seq_len - new_len, seq_len) for new_len, seq_len in lens]
    slots = [table[row][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for row, at in enumerate(positions)]
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=np.zeros(sum(new_lens), np.int64),
        positions=np.concatenate(positions),
        out_slots=np.concatenate(slots).astype(np.int64),
        page_table=table,
        seq_lens=np.array(seq_lens),
        extend_lens=np.array(new_lens),
        num_sampled=np.ones(len(new_lens), np.int64),
    )


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_they_give_what_latents_give(kv_dtype: torch.dtype, scale: float, device: torch.device) -> None:
    from diptych.engine.attention.decompression import Decompression
    from diptych.engine.attention.latent_prompts import LatentPrompts
    from diptych.engine.attention.triton_backend import TritonAttention
    from diptych.engine.attention.triton_kernels import fastest

    is_scaled = kv_dtype == torch.float8_e4m3fn and scale != 1
    config = replace(LATENT, kv_scales=((scale, scale),) * LATENT.num_layers if is_scaled else ())
    assert config.latent is not None
    kv = torch.randn(64, config.num_layers, 1, PAGE_SIZE, 1, config.head_dim, device=device).to(kv_dtype)
    plan = Decompression(config.latent, HEADS, 4, PAGE_SIZE, 128)
    prompts = LatentPrompts(plan, config.score_scale, torch.float32, device)
    own = kv.clone()
    ours = TritonAttention(config, own, fastest(config, own, torch.float32), prompts=prompts)
    reference = TorchAttention(config, kv, torch.float32)
    batch, heads = stage(batch_of([9, 30, 1], [40, 30, 17]), device), Heads(device)
    qkv = torch.randn(40, HEADS + 1, config.head_dim, device=device)
    absorbed = qkv.clone()
    absorbed[:, :-1, :RANK] = heads.absorbed(qkv[:, :-1, :NOPE])
    qkv[:, :-1, NOPE:RANK] = torch.nan  # nothing reads it
    out, latents = qkv.new_empty(40, HEADS, VALUE), qkv.new_empty(40, HEADS * RANK)
    for backend in (ours, reference):
        backend.init_forward_metadata(batch)
    ours.forward_decompressed(qkv.flatten(1), 1, out, heads)
    reference.forward_extend(absorbed.flatten(1), 1, latents)
    torch.testing.assert_close(out, heads.unfolded(latents.view(40, HEADS, RANK)), atol=2e-4, rtol=2e-4)
