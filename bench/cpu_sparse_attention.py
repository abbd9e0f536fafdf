"""Sparse attention of DeepSeek V3.2 on CPUs, in float32: the C kernels beside the form in torch.

    python bench/cpu_sparse_attention.py [--threads N] [--quick] [--json]

One layer of a model that chooses 2,048 tokens for each new one. What is counted is multiplications and additions: of 64
index heads of 128 with every key, and of all heads with the latents that were chosen. Both sides do the same; the limit
is a product of large matrices by torch in the same run. Both choose for themselves, and keep the same keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from report import Report, arguments

from diptych.architectures.config import Indexer, Latent, ModelConfig, Rope
from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.attention.cpu_sparse_backend import CpuSparseAttention
from diptych.engine.attention.sparse_attention import SparseAttention
from diptych.engine.attention.staged_batch import stage
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.kernels.cpu import library

PAGE_SIZE: Final = 64
RANK, ROPE_DIM = 512, 64
INDEX: Final = Indexer(64, 128, 2048, interleaved=False, layers=(0,))
PRODUCT: Final = 1024  # rows and columns of the product that is the limit


@dataclass(frozen=True, slots=True)
class Case:
    """A step in which each request has `new` tokens, the last of `seq_len`."""

    num_heads: int
    batch_size: int
    seq_len: int
    new: int

    @property
    def name(self) -> str:
        what = "decode" if self.new == 1 else f"extend {self.new}"
        return f"{what}, {self.num_heads} heads, B {self.batch_size}, L {self.seq_len}"

    @property
    def num_products(self) -> float:
        seen = self.seq_len - (self.new - 1) / 2
        latents = self.num_heads * (2 * RANK + ROPE_DIM) * min(INDEX.num_kept, seen)
        return self.batch_size * self.new * (INDEX.num_heads * INDEX.head_dim * seen + latents)


CASES: Final = (
    Case(128, 1, 4096, 1),
    Case(128, 1, 32_768, 1),
    Case(128, 4, 4096, 1),
    Case(128, 1, 4096, 32),
    Case(128, 1, 32_768, 32),
    Case(16, 1, 4096, 1),
)


def config_of(case: Case) -> ModelConfig:
    return ModelConfig(
        model_id="bench",
        architecture="DeepseekV32ForCausalLM",
        vocab_size=1,
        hidden_size=1,
        num_layers=1,
        num_heads=case.num_heads,
        num_kv_heads=1,
        head_dim=RANK + ROPE_DIM,
        ffn_size=1,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        bos_id=None,
        eos_ids=(),
        context_len=1 << 20,
        rope=Rope(1e4, ROPE_DIM, start=RANK),
        query_scale=192**-0.5,
        latent=Latent(1536, RANK, 128, ROPE_DIM, 128, interleaved=True, norm_eps=1e-6),
        indexer=INDEX,
    )


def batch_of(case: Case) -> ForwardBatch:
    """Return the step; the pages of requests lie anywhere."""
    num_pages = -(-case.seq_len // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(case.batch_size * num_pages)
    table = order.reshape(case.batch_size, num_pages).astype(np.int32)
    own = np.arange(case.seq_len - case.new, case.seq_len)
    slots = table[:, own // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + own % PAGE_SIZE
    return ForwardBatch(
        mode=ForwardMode.DECODE if case.new == 1 else ForwardMode.EXTEND,
        input_ids=np.zeros(case.batch_size * case.new, np.int64),
        positions=np.tile(own, case.batch_size),
        out_slots=slots.ravel(),
        page_table=table,
        seq_lens=np.full(case.batch_size, case.seq_len),
        extend_lens=np.full(case.batch_size, case.new),
        num_sampled=np.ones(case.batch_size, np.int64),
    )


def run_of(attention: AttentionBackend, config: ModelConfig, batch: ForwardBatch) -> Callable[[], object]:
    attention.init_forward_metadata(stage(batch, torch.device("cpu")))
    qkv = torch.randn(len(batch.positions), config.qkv_size)
    out = torch.empty(len(batch.positions), config.num_heads * config.value_dim)
    forward = attention.forward_decode if batch.mode is ForwardMode.DECODE else attention.forward_extend
    return lambda: forward(qkv.clone(), 0, out)


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Return those of the fastest of some runs, after one that counts for nothing."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(report: Report, case: Case, products_s: float, rounds: int) -> None:
    config, batch = config_of(case), batch_of(case)
    num_pages = batch.page_table.size
    kv = torch.randn(num_pages, 1, 1, PAGE_SIZE, 1, config.head_dim)
    index_keys = torch.randn(num_pages, 1, 1, PAGE_SIZE, 1, INDEX.head_dim)
    ours = seconds(run_of(CpuSparseAttention(config, kv, index_keys), config, batch), rounds)
    theirs = seconds(run_of(SparseAttention(config, kv, index_keys, torch.float32), config, batch), rounds)
    value = case.num_products / ours
    report.row(
        "cpu_sparse_attention",
        case.name,
        value / 1e9,
        "G products/s",
        products_s / 1e9,
        "matrix product",
        value / products_s,
        {"torch": case.num_products / theirs / 1e9},
    )


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library.set_num_threads(options.threads)
    rounds = 3 if options.quick else 8
    left, right = torch.randn(2, PRODUCT, PRODUCT)
    with torch.inference_mode(), Report(as_json=options.json) as report:
        products_s = PRODUCT**3 / seconds(lambda: left @ right, rounds)
        for case in CASES[:2] if options.quick else CASES:
            measure(report, case, products_s, rounds)


if __name__ == "__main__":
    main()
