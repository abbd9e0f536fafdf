"""Sparse attention to the latents of DeepSeek V3.2 over paged KV against the memory limit, and against dense attention.

Layers of one pool take turns, so that each reads its pages from memory, as in a model. A decode step of a layer that
chooses reads the index keys of all that each request sees, 128 numbers a token, and the latents of 2,048 tokens, 576
numbers each; the limit is one read of these at the speed of a copy. It is shown whole, and in its three parts: index
scores, the choice, and attention to what was chosen. Next to it is dense attention to the same latents, in
the same unit: the bytes that sparse attention has to read, divided by the time that dense attention takes.

    python bench/gpu/sparse_attention.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.kernels.gpu.attention.choose_tokens import choose_tokens
from diptych.kernels.gpu.attention.index_scores import IndexRows, IndexShape, index_programs, index_scores
from diptych.kernels.gpu.attention.latent_attention import LatentShape, LatentWorkspace, latent_decode, latent_splits
from diptych.kernels.gpu.attention.sparse_latent_attention import (
    SparseWorkspace,
    most_parts,
    parts_of_rows,
    sparse_latent_attention,
)

RANK: Final = 512
ROPE_DIM: Final = 64
INDEX_HEADS: Final = 64
INDEX_DIM: Final = 128
NUM_KEPT: Final = 2048
PAGE_SIZE: Final = 64
CONTEXT_LEN: Final = 163_840
SCALE: Final = 192**-0.5
POOL_NBYTES: Final = 40 << 30  # layers take turns while they fit, up to
NUM_LAYERS: Final = 4
DTYPES: Final = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
DECODE: Final = tuple(
    (name, heads, *case)
    for name in DTYPES
    for heads in (128, 16)
    for case in ((64, 4096), (64, 32_768), (64, 131_072), (1, 131_072))
)
QUICK: Final = (("bf16", 128, 64, 4096), ("bf16", 128, 64, 32_768), ("bf16", 128, 64, 131_072))
EXTEND: Final = (("bf16", 128, 4096, 1024), ("bf16", 128, 32_768, 1024))
Run = Callable[[], object]


class Pool:
    """Requests of equal length whose pages are scattered over a pool of random latents and index keys."""

    def __init__(self, kind: str, num_heads: int, batch_size: int, seq_len: int, new: int = 1) -> None:
        dtype, per_request = DTYPES[kind], -(-seq_len // PAGE_SIZE)
        num_pages = batch_size * per_request
        layer_nbytes = num_pages * PAGE_SIZE * (RANK + ROPE_DIM + INDEX_DIM) * dtype.itemsize
        num_layers = max(1, min(NUM_LAYERS, POOL_NBYTES // layer_nbytes))
        shapes = [(num_layers, 1, PAGE_SIZE, 1, dim) for dim in (RANK + ROPE_DIM, INDEX_DIM)]
        self.kv, self.index_keys = (_random((num_pages, *shape), dtype) for shape in shapes)
        self.page_table = torch.randperm(num_pages, device="cuda", dtype=torch.int32).view(batch_size, -1)
        self.seq_lens = torch.full((batch_size,), seq_len, dtype=torch.int32, device="cuda")
        lens = self.seq_lens[:, None] - torch.arange(new - 1, -1, -1, device="cuda")
        requests = torch.arange(batch_size, device="cuda").repeat_interleave(new)
        self.rows = IndexRows(self.page_table, requests.int(), lens.flatten().int())
        self.shape = LatentShape(num_heads, RANK, ROPE_DIM, PAGE_SIZE, torch.bfloat16, dtype)
        self.index_shape = IndexShape(INDEX_HEADS, INDEX_DIM, NUM_KEPT, PAGE_SIZE, torch.bfloat16, dtype)
        num_rows = batch_size * new
        self.q = _random((num_rows, num_heads, RANK + ROPE_DIM), torch.bfloat16)
        self.index = _random((num_rows, self.index_shape.size), torch.bfloat16)
        self.out = torch.empty(num_rows, num_heads, RANK, device="cuda", dtype=torch.bfloat16)
        self.chosen = torch.zeros(num_rows, NUM_KEPT, device="cuda", dtype=torch.int32)
        self.num_sms = torch.cuda.get_device_properties(self.q.device).multi_processor_count
        self.index_nbytes = batch_size * seq_len * INDEX_DIM * dtype.itemsize
        self.kept_nbytes = batch_size * min(NUM_KEPT, seq_len) * (RANK + ROPE_DIM) * dtype.itemsize


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random numbers, made piece by piece: a pool in float32 would not fit."""
    made = torch.empty(shape, device="cuda", dtype=dtype)
    for part in torch.split(made, max(1, (1 << 28) // made[0].numel())):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    return made


class Parts:
    """The three parts of a step, as runs of a layer each."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._width = -(-CONTEXT_LEN // PAGE_SIZE) * PAGE_SIZE  # as for a worker's largest context
        self._scores = torch.zeros(min(204, len(pool.q)), self._width, device="cuda")
        self._workspace = SparseWorkspace.allocate(pool.shape, most_parts(pool.shape, pool.num_sms), pool.q.device)
        self._num_parts = parts_of_rows(pool.shape, len(pool.q), NUM_KEPT, pool.num_sms)

    def score(self, keys: Tensor, rows: slice) -> None:
        pool, programs = self._pool, index_programs(len(self._scores), self._width, self._pool.num_sms)
        part, shape = pool.rows.part(rows), pool.index_shape
        index_scores(pool.index[rows], keys, part, self._scores, shape, num_programs=programs)

    def choose(self, rows: slice) -> None:
        choose_tokens(self._scores, self._pool.rows.part(rows), self._pool.chosen[rows], page_size=PAGE_SIZE)

    def attend(self, kv: Tensor) -> None:
        pool = self._pool
        arguments = pool.q, kv, pool.chosen, pool.rows.lens, pool.out, self._workspace, pool.shape
        sparse_latent_attention(*arguments, scale=SCALE, num_parts=self._num_parts)

    def all(self, kv: Tensor, keys: Tensor) -> None:
        """As a layer that chooses does it."""
        for first in range(0, len(self._pool.q), len(self._scores)):
            rows = slice(first, min(first + len(self._scores), len(self._pool.q)))
            self.score(keys, rows)
            self.choose(rows)
        self.attend(kv)


def runs_of_layers(pool: Pool, run: Callable[[Tensor, Tensor], None]) -> Sequence[Run]:
    def of(kv: Tensor, keys: Tensor) -> Run:
        return lambda: run(kv, keys)

    return [of(*layer) for layer in zip(pool.kv.unbind(1), pool.index_keys.unbind(1), strict=True)]


def dense_runs(pool: Pool) -> Sequence[Run]:
    shares = latent_splits(pool.shape, len(pool.q), CONTEXT_LEN, pool.num_sms)
    workspace = LatentWorkspace.allocate(pool.shape, shares, pool.q.device)

    def run(kv: Tensor, keys: Tensor) -> None:
        arguments = pool.q, kv, pool.page_table, pool.seq_lens, pool.out, workspace, pool.shape
        latent_decode(*arguments, scale=SCALE, num_splits=shares)

    return runs_of_layers(pool, run)


def measure_decode(report: Report, limits: Roofline, kind: str, num_heads: int, batch_size: int, seq_len: int) -> None:
    pool = Pool(kind, num_heads, batch_size, seq_len)
    parts, every = Parts(pool), slice(0, batch_size)
    nbytes, limit = pool.index_nbytes + pool.kept_nbytes, limits.copy_bytes_s
    case = f"decode {kind}, {num_heads} heads, B {batch_size}, L {seq_len}"
    dense = {"dense": nbytes / seconds_each(dense_runs(pool)) / 1e9}
    pieces = {
        "": (parts.all, nbytes, dense),
        ": index scores": (lambda kv, keys: parts.score(keys, every), pool.index_nbytes, {}),
        ": choice": (lambda kv, keys: parts.choose(every), 4 * batch_size * seq_len, {}),
        ": attention": (lambda kv, keys: parts.attend(kv), pool.kept_nbytes, {}),
    }
    for name, (run, moved, peers) in pieces.items():
        value = moved / seconds_each(runs_of_layers(pool, run))
        report.row("gpu/sparse_attention", case + name, value / 1e9, "GB/s", limit / 1e9, "copy", value / limit, peers)


def measure_extend(report: Report, limits: Roofline, kind: str, num_heads: int, seq_len: int, new: int) -> None:
    """One request's chunk; the limit is its products: of index heads with all keys, of heads with what is kept."""
    pool = Pool(kind, num_heads, 1, seq_len, new)
    parts = Parts(pool)
    scores = INDEX_HEADS * INDEX_DIM * new * (seq_len - new / 2)
    attention = num_heads * (2 * RANK + ROPE_DIM) * new * NUM_KEPT
    value = 2 * (scores + attention) / seconds_each(runs_of_layers(pool, parts.all))
    limit = limits.bf16_flops_s
    case = f"extend {kind}, {num_heads} heads, the last {new} of {seq_len}"
    report.row("gpu/sparse_attention", case, value / 1e12, "TFLOP/s", limit / 1e12, "bf16 product", value / limit, {})


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for decode in QUICK if options.quick else DECODE:
            measure_decode(report, limits, *decode)
        for extend in EXTEND[:1] if options.quick else EXTEND:
            measure_extend(report, limits, *extend)


if __name__ == "__main__":
    main()
