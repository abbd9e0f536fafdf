"""Attention by Triton kernels gives what the reference gives, and leaves the same KV behind, step after step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_pools import Pools
from tiny_config import tiny_config

from diptych.architectures.config import Latent, ModelConfig, Rope
from diptych.engine.attention.staged_batch import stage
from diptych.engine.runner.gpu.ladder import pad
from diptych.engine.values.batch import ForwardMode
from diptych.engine.values.limits import MAX_DRAFTS

LLAMA = tiny_config(context_len=128)
GEMMA = replace(LLAMA, windows=(7, 0), local_rope=Rope(1e3, 16), attention_softcap=5.0, query_scale=0.2)
SCALED = replace(LLAMA, kv_scales=((0.5, 0.03), (0.02, 2.0)))
PARTLY_ROTATED = replace(LLAMA, rope=Rope(1e4, 8), num_heads=3, num_kv_heads=1)
LATENT = replace(
    tiny_config(num_heads=5, num_kv_heads=1, head_dim=48, rope=Rope(1e4, 16, start=32), query_scale=0.2),
    latent=Latent(0, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6),
)
GPT_OSS = replace(LLAMA, windows=(7, 0), sinks=True)
LLAMA4 = replace(LLAMA, windows=(7, 0), chunked=True, rope=Rope.still(16), local_rope=LLAMA.rope)
CONFIGS = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "gpt oss": GPT_OSS,
    "llama 4": LLAMA4,
    "partly rotated": PARTLY_ROTATED,
    "latent": LATENT,
}
SHAPES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def new_pools(config: ModelConfig, kv_dtype: torch.dtype, device: torch.device) -> Pools:
    from diptych.engine.attention.triton_backend import TritonAttention
    from diptych.engine.attention.triton_kernels import fastest

    def new(config: ModelConfig, kv: torch.Tensor, sinks: torch.Tensor | None) -> TritonAttention:
        return TritonAttention(config, kv, fastest(config, kv, torch.float32), sinks)

    return Pools(config, kv_dtype, device, new)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "are_served"),
    [
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float16, True),
        (torch.float8_e4m3fn, torch.float32, False),  # neither planned nor is there memory for expanded pages
        (torch.bfloat16, torch.float16, False),
    ],
)
def test_prompts_on_hopper_are_planned_for_states_that_the_kernel_takes(
    kv_dtype: torch.dtype, dtype: torch.dtype, are_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.engine.attention import hopper_prompts

    monkeypatch.setattr(hopper_prompts, "serves", lambda kv: True)
    monkeypatch.setattr(hopper_prompts, "EXPANDED_NBYTES", 1 << 20)
    pool = torch.zeros(4, LLAMA.num_layers, 2, 16, LLAMA.num_kv_heads, LLAMA.head_dim).to(kv_dtype)
    assert (hopper_prompts.HopperPrompts.of(LLAMA, pool, dtype) is not None) == are_served


def test_a_request_that_its_pool_is_too_small_for_is_an_error_and_reads_no_table_beyond_its_end(
    device: torch.device,
) -> None:
    pools = new_pools(LLAMA, torch.float32, device)
    pools.extend({"a": LLAMA.context_len})
    with pytest.raises(AssertionError, match="129 tokens, but the pool is for 128"):
        pools.extend({"a": 1})


@SHAPES
def test_prompts_in_parts_mixed_steps_and_single_tokens_are_as_in_the_reference(
    config: ModelConfig, device: torch.device
) -> None:
    pools = new_pools(config, torch.float32, device)
    pools.extend({"a": 9, "b": 1})
    pools.extend({"b": 1, "a": 6, "c": 4}, ForwardMode.MIXED)
    pools.decode(["a", "b", "c"])
    pools.decode(["c"])


@pytest.mark.parametrize("config", [LLAMA, SCALED, LATENT], ids=["unscaled", "scaled", "latent"])
def test_narrow_pools_hold_the_same_bytes(config: ModelConfig, device: torch.device) -> None:
    pools = new_pools(config, torch.float8_e4m3fn, device)
    pools.extend({"a": 9, "b": 3})
    pools.extend({"b": 1, "a": 4}, ForwardMode.MIXED)
    pools.decode(["b", "a"])


def test_shares_of_a_step_over_latents_have_room_whatever_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.engine.attention.triton_kernels import DTYPES, INTERPRETER_SMS, LatentKernels, most_rows
    from diptych.kernels.gpu.attention.latent_attention import LatentShape, LatentWorkspace, latent_splits

    room: list[int] = []
    monkeypatch.setattr(LatentWorkspace, "allocate", lambda shape, num_splits, device: room.append(num_splits))
    pool = torch.zeros(9, 1, 1, 16, 1, 48, dtype=torch.float8_e4m3fn)
    LatentKernels(LATENT, pool)
    shapes = [LatentShape(LATENT.num_heads, 32, 16, 16, dtype, pool.dtype) for dtype in DTYPES]
    assert room == [max(latent_splits(shape, most_rows(pool), 9 * 16, INTERPRETER_SMS) for shape in shapes)]
    assert room > [INTERPRETER_SMS]  # two programs of an SM


def test_what_is_launched_over_latents_follows_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.engine.attention import triton_kernels

    monkeypatch.setattr(triton_kernels, "shared_nbytes", lambda _device: 99 << 10)
    monkeypatch.setattr(triton_kernels, "starts_early", lambda _device: True)
    shapes = triton_kernels.latent_shapes(LATENT, torch.zeros(9, 1, 1, 16, 1, 48, dtype=torch.float16))
    assert {(shape.shared_nbytes, shape.starts_early) for shape in shapes.values()} == {(99 << 10, True)}
    assert list(shapes) == [shape.dtype for shape in shapes.values()]


@pytest.mark.parametrize("num_pages", [3, 5000])
def test_rows_of_drafts_have_room_beside_as_many_requests_as_there_may_be(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.engine.attention import triton_kernels

    room: list[int] = []
    monkeypatch.setattr(triton_kernels, "decode_workspace", lambda batch, *sizes: room.append(batch))
    pool = torch.zeros(num_pages, LLAMA.num_layers, 2, 1, LLAMA.num_kv_heads, LLAMA.head_dim)
    triton_kernels.PairKernels(LLAMA, pool, torch.float32)
    fixed = triton_kernels.FixedOrderKernels(LLAMA, pool)
    num_rows = max(triton_kernels.LARGEST_BATCH, num_pages) + MAX_DRAFTS
    assert room == [num_rows]
    assert len(fixed._starts) == num_rows + 1


def test_scales_are_for_fp8_only(device: torch.device) -> None:
    scaled, plain = (new_pools(config, torch.float32, device) for config in (SCALED, LLAMA))
    for pools in (scaled, plain):
        torch.manual_seed(1)
        pools.extend({"a": 9})
    assert torch.equal(scaled.kv[0], plain.kv[0])


def test_rows_of_padding_read_and_store_nothing_and_give_zeros(device: torch.device) -> None:
    pools = new_pools(LLAMA, torch.float32, device)
    pools.extend({"a": 5})
    host = pools.batch({"a": 1}, ForwardMode.DECODE)
    padded = stage(pad(host, 2), device)
    before = pools.kv[0].clone()
    (qkv, out), _ = pools.states(2)
    pools.backend.capture_metadata(padded)
    pools.backend.replay_metadata(padded)
    pools.backend.forward_decode(qkv, 0, out)
    assert not out[1].any()
    assert out[0].isfinite().all()
    changed = (pools.kv[0] != before).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[int(host.page_table[0, -1]), 0]]
