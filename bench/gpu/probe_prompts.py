"""One variant of prompt attention: compiled, compared, timed."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import diptych.kernels.gpu.attention.prompt_attention as module
from diptych.kernels.gpu.attention.expand_pages import expand_pages, expanded_table
from diptych.kernels.gpu.attention.extend_attention import extend_attention, reference_extend_attention
from diptych.kernels.gpu.attention.prompt_attention import PromptTile, PromptWork, prompt_attention
from device_clock import seconds_each
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, make_states, random_queries
import kv_states

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CASES = ((1, 0, 4096), (2, 0, 4096), (8, 0, 1024), (1, 3072, 1024), (1, 31744, 1024), (1, 0, 32768))
SMALL = (
    (1, 0, 512),
    (1, 1024, 256),
    (1, 8192, 128),
    (4, 1024, 256),
    (1, 0, 1024),
    (1, 8192, 512),
    (16, 0, 64),
    (1, 0, 2048),
)
VARIANTS = {
    "A": {},
    "A ahead": {"ahead": True},
    "turns": {"ahead": True, "takes_turns": True},
    "64s4": {"ahead": True, "keys": 64, "stages": 4},
    "64s4 turns": {"ahead": True, "keys": 64, "stages": 4, "takes_turns": True},
    "1x8": {"ahead": True, "groups": 1, "num_warps": 8},
    "3x64": {"keys": 64, "stages": 3, "groups": 3, "registers": 160, "copy_registers": 24},
    "232": {"ahead": True, "registers": 232, "copy_registers": 40},
    "pages 128": {"ahead": True, "page": 128},
}


def flops(b, prefix, new):
    return 4 * b * NUM_HEADS * HEAD_DIM * new * (prefix + (new + 1) / 2)


def lens(b, prefix, new):
    return np.full(b, new, dtype=np.int64), np.full(b, prefix + new, dtype=np.int64)


def starts(b, new):
    return torch.arange(b + 1, dtype=torch.int32, device="cuda") * new


REAL = module.prompt_attention_kernel


def compile_only(tile):
    kernel = REAL

    class Warm:
        def __getitem__(self, grid):
            def launch(*a, **k):
                self.compiled = kernel.warmup(*a, grid=(1,), **k)

            return launch

    warm = module.prompt_attention_kernel = Warm()
    s, q = make_states(1, 256, BF16), random_queries(256)
    for layer in (s.layers[0],):
        work = PromptWork.of(*lens(1, 0, 256), layer, NUM_HEADS, tile)
        prompt_attention(
            q, layer, s.page_table, s.seq_lens, starts(1, 256), torch.empty_like(q), work, scale=SCALE, tile=tile
        )
    return warm.compiled


def check(tile, b, prefix, new, dtype=BF16):
    s, q = make_states(b, prefix + new, dtype), random_queries(b * new)
    out = torch.full_like(q, torch.nan)
    run_ours(s, q, b, prefix, new, tile, out)[0]()
    expected = reference_extend_attention(q, s.layers[0], s.page_table, s.seq_lens, starts(b, new), scale=SCALE)
    distance = ((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    return float(distance)


def run_ours(s, q, b, prefix, new, tile, out):
    kv0, table, pool = s.layers[0], s.page_table, None
    if s.kv.dtype == FP8:
        t = expanded_table(lens(b, prefix, new)[1], 128)
        pool = torch.zeros(int(t.max()) + 1, 2, 128, NUM_KV_HEADS, HEAD_DIM, dtype=BF16, device="cuda")
        kv0, table = pool, torch.from_numpy(t).cuda()
    work = PromptWork.of(*lens(b, prefix, new), kv0, NUM_HEADS, tile)
    st = starts(b, new)

    def run(layer):
        def go():
            if pool is None:
                prompt_attention(q, layer, table, s.seq_lens, st, out, work, scale=SCALE, tile=tile)
            else:
                expand_pages(layer, s.page_table, s.seq_lens, pool, table)
                prompt_attention(q, pool, table, s.seq_lens, st, out, work, scale=SCALE, tile=tile)

        return go

    return [run(layer) for layer in s.layers]


def rate(runs, case):
    return flops(*case) / seconds_each(runs[:8], rounds=10 if case[2] > 8192 else 20) / 1e12


def product():
    a, b = (torch.randn(8192, 8192, dtype=BF16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / seconds_each([lambda: a @ b]) / 1e12


def peers():
    import flashinfer_peer

    print(f"bf16 product {product():.0f}", flush=True)
    for dtype in (BF16, FP8):
        for case in CASES:
            b, prefix, new = case
            s, q = make_states(b, prefix + new, dtype), random_queries(b * new)
            out = torch.empty_like(q)
            found = {}
            old = [
                lambda layer=layer: extend_attention(
                    q, layer, s.page_table, s.seq_lens, starts_, out, max_extend_len=new, scale=SCALE
                )
                for layer in s.layers
            ]
            starts_ = starts(b, new)
            found["old"] = rate(old, case)
            for name, make in {
                "flashinfer": lambda: flashinfer_peer.extend_runs(s, q, new),
                "sdpa": lambda: sdpa(b, prefix, new),
                "fa3": lambda: fa3(b, prefix, new, s, q),
            }.items():
                if name == "sdpa" and dtype == FP8:
                    continue
                try:
                    found[name] = rate(make(), case)
                except Exception as error:
                    found[name] = type(error).__name__
            print(dtype, case, {k: round(v) if isinstance(v, float) else v for k, v in found.items()}, flush=True)
            del s, q, out, old
            torch.cuda.empty_cache()


def sdpa(b, prefix, new):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q = torch.randn(b, NUM_HEADS, new, HEAD_DIM, dtype=BF16, device="cuda")
    k, v = (torch.randn(b, NUM_KV_HEADS, prefix + new, HEAD_DIM, dtype=BF16, device="cuda") for _ in range(2))

    def run():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            if prefix:
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=causal_lower_right(new, prefix + new), enable_gqa=True
                )
            else:
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return [run]


def fa3(b, prefix, new, s, q):
    import flash_attn_interface as f

    return [
        lambda layer=layer: f.flash_attn_with_kvcache(
            q.view(b, new, NUM_HEADS, HEAD_DIM),
            layer[:, 0],
            layer[:, 1],
            cache_seqlens=s.seq_lens,
            page_table=s.page_table,
            causal=True,
        )
        for layer in s.layers
    ]


def main():
    what, name = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    torch.manual_seed(0)
    if what == "peers":
        return peers()
    if what == "small":
        for case in SMALL:
            b, prefix, new = case
            s, q = make_states(b, prefix + new, BF16), random_queries(b * new)
            out, st = torch.empty_like(q), starts(b, new)
            old = [
                lambda layer=layer: extend_attention(
                    q, layer, s.page_table, s.seq_lens, st, out, max_extend_len=new, scale=SCALE
                )
                for layer in s.layers
            ]
            print(
                "small",
                case,
                f"old {rate(old, case):.0f}",
                *(
                    f"{v} {rate(run_ours(s, q, b, prefix, new, PromptTile(**VARIANTS[v]), out), case):.0f}"
                    for v in sys.argv[2:]
                ),
                flush=True,
            )
        return
    if what == "list":
        for one in sys.argv[2:]:
            try:
                measure("run", one)
            except Exception as error:
                print(one, type(error).__name__, str(error)[:300], flush=True)
        return
    measure(what, name)


def measure(what, name):
    options = dict(VARIANTS[name])
    kv_states.PAGE_SIZE = options.pop("page", 16)
    tile = PromptTile(**options)
    began = time.time()
    compiled = compile_only(tile)
    if what == "compile":
        ptx = compiled.asm["ptx"]
        import re, subprocess, tempfile, os, triton

        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            ptxas = os.path.dirname(triton.__file__) + "/backends/nvidia/bin/ptxas"
            said = subprocess.run(
                [ptxas, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"], capture_output=True, text=True
            ).stderr
        print(
            name,
            f"{time.time() - began:.0f} s",
            "shared",
            compiled.metadata.shared,
            sorted(set(re.findall(r"setmaxnreg[^;]*", ptx))),
            " | ".join(l for l in said.splitlines() if "spill" in l or "Used" in l or "C75" in l or "arning" in l),
            flush=True,
        )
        return
    module.prompt_attention_kernel = REAL
    off = [check(tile, *case) for case in ((1, 0, 777), (2, 1000, 700))]
    print(name, "off by", [f"{x:.1e}" for x in off], flush=True)
    dtypes = (BF16, FP8) if name in ("A ahead",) else (BF16,)
    for dtype in dtypes:
        found = {}
        for case in CASES:
            b, prefix, new = case
            s, q = make_states(b, prefix + new, dtype), random_queries(b * new)
            found[case] = rate(run_ours(s, q, b, prefix, new, tile, torch.empty_like(q)), case)
            del s, q
        print(f"{name:14s} {str(dtype)[6:]:12s}", "  ".join(f"{v:5.0f}" for v in found.values()), flush=True)


if __name__ == "__main__":
    main()
