"""Attention to the latents of DeepSeek V3 over paged KV against the memory and the matrix limit.

Layers of one pool take turns, so that each reads its latents from memory, as in a model. Decode: the limit is one read
of the latents at the speed of a copy, or the two products at the speed of large ones, whichever takes longer. Extend:
the two products; half of the square of new tokens counts. Decompressed: the same new tokens with keys and values that
are made of latents in the same time; the limit is both products that are left and the two that make them. Decode steps
in 16 bits stand beside FlashInfer's where it can be imported; else it is said why it does not.

    python bench/gpu/latent_attention.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import flashinfer_peer
import numpy as np
import torch
from device_clock import seconds_each, speeds
from numpy.typing import NDArray
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.architectures.config import Latent
from diptych.engine.attention.decompression import Decompression
from diptych.engine.attention.latent_prompts import LatentPrompts
from diptych.engine.attention.staged_batch import stage
from diptych.engine.models.matrices.matrix import TorchHeadMatrices
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.kernels.gpu.attention.latent_attention import (
    LatentShape,
    LatentWorkspace,
    latent_decode,
    latent_extend,
    latent_splits,
)
from diptych.kernels.gpu.hopper import shared_nbytes, starts_early

RANK: Final = 512
ROPE_DIM: Final = 64
PAGE_SIZE: Final = 64
CONTEXT_LEN: Final = 163_840
HEAD_DIM: Final = 128  # of made keys, beside what rotates, and of values
SCALE: Final = 192**-0.5
LATENT: Final = Latent(1536, RANK, HEAD_DIM, ROPE_DIM, HEAD_DIM, interleaved=True, norm_eps=1e-6)
NUM_LAYERS: Final = 4
DTYPES: Final = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
DECODE: Final = tuple(
    (name, heads, *case)
    for name in DTYPES
    for heads in (128, 16)
    for case in ((64, 4096), (8, 4096), (1, 32_768), (128, 1024))
)
QUICK_DECODE: Final = (("bf16", 128, 64, 4096), ("bf16", 16, 64, 4096), ("fp8", 128, 64, 4096))
EXTEND: Final = (
    ("bf16", 128, 1, 0, 4096),
    ("bf16", 128, 1, 3072, 1024),
    ("bf16", 128, 1, 30_720, 2048),
    ("bf16", 16, 1, 30_720, 2048),
    ("bf16", 16, 4, 0, 1024),
    ("bf16", 16, 1, 0, 8192),
    ("bf16", 16, 1, 3840, 256),
)
Run = Callable[[], object]


class Pool:
    """Requests of equal length whose pages are scattered over a pool of random latents."""

    def __init__(self, kind: str, num_heads: int, batch_size: int, seq_len: int) -> None:
        num_pages = batch_size * -(-seq_len // PAGE_SIZE)
        kept = torch.randn(num_pages, NUM_LAYERS, 1, PAGE_SIZE, 1, RANK + ROPE_DIM, device="cuda", dtype=torch.bfloat16)
        self.kv = kept.to(DTYPES[kind])
        order = torch.randperm(num_pages, device="cuda", dtype=torch.int32)
        self.page_table = order.view(batch_size, -1)
        self.seq_lens = torch.full((batch_size,), seq_len, dtype=torch.int32, device="cuda")
        self.shape = LatentShape(
            num_heads, RANK, ROPE_DIM, PAGE_SIZE, torch.bfloat16, self.kv.dtype, *on_device(self.kv.device)
        )
        self.layer_nbytes = batch_size * seq_len * (RANK + ROPE_DIM) * self.kv.itemsize

    def queries(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return random queries, and a place for results."""
        q = torch.randn(num_tokens, self.shape.num_heads, RANK + ROPE_DIM, device="cuda", dtype=torch.bfloat16)
        return q, torch.empty(num_tokens, self.shape.num_heads, RANK, device="cuda", dtype=torch.bfloat16)


def on_device(device: torch.device) -> tuple[int, bool]:
    """Return what a `LatentShape` wants to know of it."""
    return shared_nbytes(device), starts_early(device)


class Heads:
    """What makes keys and values of a layer: `LatentHeads`."""

    def __init__(self, num_heads: int) -> None:
        weights = torch.randn(2, num_heads, RANK, HEAD_DIM, device="cuda", dtype=torch.bfloat16) / RANK**0.5
        self._keys, self._values = TorchHeadMatrices(weights[0]), TorchHeadMatrices(weights[1].mT)

    def keys_of(self, latents: Tensor, out: Tensor) -> None:
        self._keys.spread_back(latents, out)

    def values_of(self, latents: Tensor, out: Tensor) -> None:
        self._values.spread(latents, out)


def decode_runs(pool: Pool) -> Sequence[Run]:
    """One step a layer, shared out as for a worker's largest context, not for this one."""
    (q, out), batch = pool.queries(len(pool.seq_lens)), len(pool.seq_lens)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = latent_splits(pool.shape, batch, CONTEXT_LEN, num_sms)
    workspace = LatentWorkspace.allocate(pool.shape, shares, q.device)

    def run(layer: Tensor) -> Run:
        tables = pool.page_table, pool.seq_lens
        return lambda: latent_decode(q, layer, *tables, out, workspace, pool.shape, scale=SCALE, num_splits=shares)

    return [run(layer) for layer in pool.kv.unbind(1)]


def peers_of(pool: Pool) -> dict[str, float]:
    """Return the same step by others, in GB/s."""
    if pool.kv.dtype != torch.bfloat16:
        return {}
    q, _ = pool.queries(len(pool.seq_lens))
    tables = pool.page_table, pool.seq_lens, RANK, SCALE
    flashinfer = partial(flashinfer_peer.latent_decode_runs, q, pool.kv.unbind(1), *tables)
    return speeds(pool.layer_nbytes / 1e9, {"flashinfer": flashinfer})


def extend_runs(pool: Pool, new: int) -> Sequence[Run]:
    batch = len(pool.seq_lens)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * new
    q, out = pool.queries(batch * new)

    def run(layer: Tensor) -> Run:
        return lambda: latent_extend(q, layer, pool.page_table, pool.seq_lens, starts, out, pool.shape, scale=SCALE)

    return [run(layer) for layer in pool.kv.unbind(1)]


def decompressed_runs(pool: Pool, plan: Decompression, new: int) -> Sequence[Run]:
    batch, seq_len = len(pool.seq_lens), int(pool.seq_lens[0])
    q, _ = pool.queries(batch * new)
    out, heads = q.new_empty(len(q), plan.num_heads, HEAD_DIM), Heads(plan.num_heads)
    step = stage(batch_of([new] * batch, [seq_len] * batch, pool.page_table.cpu().numpy()), q.device)
    prompts = LatentPrompts(plan, SCALE, torch.bfloat16, q.device)

    def run(layer: Tensor) -> Run:
        return lambda: prompts.attend(layer, 1.0, q, out, step, heads)

    return [run(layer) for layer in pool.kv.unbind(1)]


def batch_of(new_lens: Sequence[int], seq_lens: Sequence[int], page_table: NDArray[np.int32]) -> ForwardBatch:
    """Return a step of which only lengths and pages are read."""
    num_tokens = sum(new_lens)
    nothing = np.zeros(num_tokens, np.int64)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=nothing,
        positions=nothing,
        out_slots=nothing,
        page_table=page_table,
        seq_lens=np.array(seq_lens),
        extend_lens=np.array(new_lens),
        num_sampled=np.ones(len(new_lens), np.int64),
    )


def num_flops(num_heads: int, num_pairs: float) -> float:
    """Count the operations of the two products, for so many pairs of a query and a key."""
    return 2 * num_heads * (2 * RANK + ROPE_DIM) * num_pairs


def measure_decode(report: Report, limits: Roofline, kind: str, num_heads: int, batch_size: int, seq_len: int) -> None:
    pool = Pool(kind, num_heads, batch_size, seq_len)
    value, peers = pool.layer_nbytes / seconds_each(decode_runs(pool)), peers_of(pool)
    products_s = num_flops(num_heads, batch_size * seq_len) / limits.bf16_flops_s
    limit = min(limits.copy_bytes_s, pool.layer_nbytes / products_s)
    what = "copy" if limit == limits.copy_bytes_s else "bf16 product"
    case = f"decode {kind}, {num_heads} heads, B {batch_size}, L {seq_len}"
    report.row("gpu/latent_attention", case, value / 1e9, "GB/s", limit / 1e9, what, value / limit, peers)


def measure_extend(
    report: Report, limits: Roofline, kind: str, num_heads: int, batch_size: int, prefix: int, new: int
) -> None:
    pool = Pool(kind, num_heads, batch_size, prefix + new)
    flops = num_flops(num_heads, batch_size * new * (prefix + new / 2))
    value, limit = flops / seconds_each(extend_runs(pool, new)), limits.bf16_flops_s
    case = f"extend {kind}, {num_heads} heads, {batch_size} x {new} after {prefix}"
    report.row("gpu/latent_attention", case, value / 1e12, "TFLOP/s", limit / 1e12, "bf16 product", value / limit, {})
    plan = Decompression(LATENT, num_heads, 2, PAGE_SIZE, CONTEXT_LEN)
    products = batch_size * new * (prefix + new / 2) * (LATENT.query_dim + HEAD_DIM)
    made = batch_size * -(-new // plan.block_len) * (prefix + new) * RANK * 2 * HEAD_DIM
    took_s, limit_s = seconds_each(decompressed_runs(pool, plan, new)), 2 * num_heads * (products + made) / limit
    words, peers = f"  decompressed, {case}", {"absorbed": 1e6 * flops / value}
    report.row(
        "gpu/latent_attention", words, 1e6 * took_s, "us", 1e6 * limit_s, "its products", limit_s / took_s, peers
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for extend in EXTEND[:1] if options.quick else EXTEND:
            measure_extend(report, limits, *extend)
        for decode in QUICK_DECODE if options.quick else DECODE:
            measure_decode(report, limits, *decode)


if __name__ == "__main__":
    main()
