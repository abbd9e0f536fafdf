"""The kernels of a step at the sizes of Llama-3-8B, with the bytes that each must move: cases of `other_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE, make_states
from torch import Tensor

HIDDEN: Final = 4096
FFN: Final = 14336
VOCABULARY: Final = 128256
NUM_EXPERTS: Final = 8
QKV: Final = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
TOKENS: Final = (64, 4096)  # of a decode step, of a prefill step
EPS: Final = 1e-5
MATRICES: Final = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "lm_head": (VOCABULARY, HIDDEN),
}
SKINNY: Final = (1, 4, 8, 16)
BATCHES: Final = (1, 64)  # of logits
PIECE_NBYTES: Final = 16 << 20  # of packed pages

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size. `make` returns a run with tensors of its own."""

    name: str
    nbytes: float
    make: Callable[[], Run]
    flops: float = 0.0
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def norms() -> Iterator[Case]:
    from diptych.kernels.gpu.layers.norms import add_rms_norm, rms_norm

    weight = states(HIDDEN)
    for num_tokens in TOKENS:

        def plain(num_tokens: int = num_tokens) -> Run:
            x, out = states(num_tokens, HIDDEN), states(num_tokens, HIDDEN)
            return lambda: rms_norm(x, weight, EPS, out)

        def added(num_tokens: int = num_tokens) -> Run:
            x, delta, out = (states(num_tokens, HIDDEN) for _ in range(3))
            return lambda: add_rms_norm(x, delta, weight, EPS, out)

        def torchs(num_tokens: int = num_tokens) -> Run:
            x = states(num_tokens, HIDDEN)
            return lambda: torch.nn.functional.rms_norm(x, (HIDDEN,), weight, EPS)

        row = 2 * num_tokens * HIDDEN
        yield Case(f"rms_norm {num_tokens}", 2 * row, plain, peers={"torch": torchs})
        yield Case(f"add_rms_norm {num_tokens}", 4 * row, added)


def activations() -> Iterator[Case]:
    from diptych.kernels.gpu.layers.activations import silu_and_mul

    for num_tokens in TOKENS:

        def make(num_tokens: int = num_tokens) -> Run:
            gate_up, out = states(num_tokens, 2 * FFN), states(num_tokens, FFN)
            return lambda: silu_and_mul(gate_up, out)

        yield Case(f"silu_and_mul {num_tokens}", 2 * 3 * num_tokens * FFN, make)


def rope_store() -> Iterator[Case]:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8")):
        for num_tokens in TOKENS:
            moved = QKV + NUM_HEADS * HEAD_DIM  # numbers: all are read, queries are written back
            nbytes = 2 * moved + 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize + 4 * HEAD_DIM
            make = partial(_rope_run, make_states(1, num_tokens, dtype).kv, num_tokens)
            yield Case(f"rope_store {name} {num_tokens}", num_tokens * nbytes, make)


def _rope_run(pool: Tensor, num_tokens: int) -> Run:
    """Into some layer of the pool."""
    from diptych.kernels.gpu.attention.rope_store import rope_store

    slots = torch.randperm(len(pool) * PAGE_SIZE, device="cuda")[:num_tokens]
    positions = torch.arange(num_tokens, device="cuda")
    table = torch.randn(num_tokens, 2, HEAD_DIM // 2, device="cuda")
    qkv, layer = states(num_tokens, QKV), pool[:, int(torch.randint(pool.shape[1], ()))]
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    return lambda: rope_store(qkv, positions, slots, table, layer, **heads)


def skinny_gemm() -> Iterator[Case]:
    """Yield the matrices that are not left to cuBLAS."""
    from diptych.kernels.gpu.layers.skinny_gemm import pays_up_to, skinny_gemm

    for name, (rows, columns) in MATRICES.items():
        for num_tokens in SKINNY if pays_up_to(rows, columns) else ():

            def make(n: int = num_tokens, rows: int = rows, columns: int = columns) -> Run:
                x, weight, out = states(n, columns), states(rows, columns), states(n, rows)
                return lambda: skinny_gemm(x, weight, out)

            def cublas(n: int = num_tokens, rows: int = rows, columns: int = columns) -> Run:
                x, weight, out = states(n, columns), states(rows, columns), states(n, rows)
                return lambda: torch.mm(x, weight.T, out=out)

            nbytes = 2 * (rows * columns + num_tokens * (rows + columns))
            flops = 2 * num_tokens * rows * columns
            yield Case(f"skinny_gemm {name} {num_tokens}", nbytes, make, flops, {"cuBLAS": cublas})


def skinny_gated_gemm() -> Iterator[Case]:
    from diptych.kernels.gpu.layers.activations import silu_and_mul
    from diptych.kernels.gpu.layers.skinny_gated_gemm import skinny_gated_gemm

    for num_tokens in SKINNY:

        def make(n: int = num_tokens) -> Run:
            x, weight, out = states(n, HIDDEN), states(2 * FFN, HIDDEN), states(n, FFN)
            return lambda: skinny_gated_gemm(x, weight, out, "silu")

        def in_turn(n: int = num_tokens) -> Run:
            x, weight, gate_up, out = states(n, HIDDEN), states(2 * FFN, HIDDEN), states(n, 2 * FFN), states(n, FFN)

            def run() -> None:
                torch.mm(x, weight.T, out=gate_up)
                silu_and_mul(gate_up, out)

            return run

        nbytes = 2 * (2 * FFN * HIDDEN + num_tokens * (HIDDEN + FFN))
        flops = 2 * num_tokens * 2 * FFN * HIDDEN
        yield Case(f"skinny_gated_gemm {num_tokens}", nbytes, make, flops, {"cuBLAS, then SiLU": in_turn})


def moe() -> Iterator[Case]:
    """Mixtral's experts: eight, two a token."""
    for num_tokens in (16, 64, 4096):
        rows = 2 * num_tokens
        touched = min(NUM_EXPERTS, rows)
        flops = 2 * rows * 2 * FFN * HIDDEN
        nbytes = 2 * (touched * 2 * FFN * HIDDEN + num_tokens * HIDDEN + rows * 2 * FFN)
        yield Case(f"grouped_gemm {num_tokens}", nbytes, partial(_moe_run, num_tokens), flops)


def _moe_run(num_tokens: int) -> Run:
    from diptych.kernels.gpu.layers.moe import ExpertWeights, align_experts, choose_block, grouped_gemm

    x, weights = states(num_tokens, HIDDEN), ExpertWeights.of(states(NUM_EXPERTS, 2 * FFN, HIDDEN).unbind())
    chosen = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(2).indices
    out, block = states(2 * num_tokens, 2 * FFN), choose_block(2 * num_tokens, NUM_EXPERTS)
    return lambda: grouped_gemm(x, weights, align_experts(chosen, NUM_EXPERTS, block), out)


def sampling() -> Iterator[Case]:
    for batch_size in BATCHES:
        nbytes = 2 * batch_size * VOCABULARY
        yield Case(
            f"greedy {batch_size}",
            nbytes,
            partial(_greedy_run, batch_size),
            peers={"argmax": partial(_argmax_run, batch_size)},
        )
        yield Case(f"top-k 50, top-p 0.9, {batch_size}", nbytes, partial(_sample_run, batch_size))


def _argmax_run(batch_size: int) -> Run:
    logits = states(batch_size, VOCABULARY)
    return lambda: logits.argmax(dim=-1)


def _greedy_run(batch_size: int) -> Run:
    from diptych.kernels.gpu.sampling.sampling import greedy
    from diptych.kernels.gpu.sampling.sampling_blocks import sampling_workspace

    logits, out = states(batch_size, VOCABULARY), torch.empty(batch_size, dtype=torch.int64, device="cuda")
    workspace = sampling_workspace(batch_size, VOCABULARY, logits.device)
    return lambda: greedy(logits, out, workspace)


def _sample_run(batch_size: int) -> Run:
    from diptych.kernels.gpu.sampling.sampling import sample
    from diptych.kernels.gpu.sampling.sampling_blocks import sampling_workspace

    logits, out = states(batch_size, VOCABULARY), torch.empty(batch_size, dtype=torch.int64, device="cuda")
    temperature, top_p, min_p = (torch.full((batch_size,), value, device="cuda") for value in (0.8, 0.9, 0.0))
    top_k = torch.full((batch_size,), 50, device="cuda")
    uniforms = torch.rand(batch_size, dtype=torch.float64, device="cuda")
    workspace = sampling_workspace(batch_size, VOCABULARY, logits.device)
    return lambda: sample(logits, temperature, top_k, top_p, min_p, uniforms, out, workspace)


def low_rank() -> Iterator[Case]:
    """What eight adapters of rank 16 add to gates and ups; each token has the next one of them."""
    from diptych.kernels.adapted_matrix import AdaptedMatrix
    from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots
    from diptych.kernels.token_tiles import TokenTiles

    matrix, rank, num_slots = AdaptedMatrix(HIDDEN, ((0, FFN), (FFN, FFN))), 16, 8
    for num_tokens in (1, *TOKENS):

        def run(num_tokens: int = num_tokens) -> Run:
            device = torch.device("cuda", torch.cuda.current_device())
            slots = AdapterSlots(num_slots, rank, {"gate_up": matrix}, torch.bfloat16, device)
            slots.reserve()
            parts = [(states(rank, HIDDEN).cpu(), states(FFN, rank).cpu(), start) for start, _ in matrix.parts]
            packed = slots.prepare({"gate_up": parts})
            for slot in range(num_slots):
                slots.install(slot, packed)
            tokens = TokenTiles.of(np.arange(num_tokens) % num_slots, num_slots, device)
            x, out, table = states(num_tokens, HIDDEN), states(num_tokens, 2 * FFN), slots.table("gate_up")
            return lambda: table.add(x, tokens, out)

        of_adapters = min(num_tokens, num_slots) * 2 * rank * (HIDDEN + FFN)
        nbytes = 2 * (of_adapters + num_tokens * (HIDDEN + 4 * FFN))
        yield Case(f"adapters of rank 16, {num_tokens} tokens", nbytes, run)


PACKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "16 to 64 tokens": {"dst_page_size": 64},
    "64 to 16 tokens": {"src_page_size": 64},
    "half of the heads": {"num_heads": NUM_KV_HEADS // 2},
    "bfloat16 to FP8": {"dst_dtype": "fp8_e4m3"},
    "FP8 to bfloat16": {"src_dtype": "fp8_e4m3"},
}


def pages() -> Iterator[Case]:
    """What a sender's GPU does with a piece of 16 MiB, and a receiver's with parts of two ranks."""
    from diptych.kernels.gpu.pages.pack_pages import DTYPE_NBYTES, pack_pages
    from diptych.kernels.gpu.pages.transfer_images import PACKER_PROGRAMS, UNPACKER_PROGRAMS
    from diptych.kernels.gpu.pages.unpack_pages import unpack_pages
    from diptych.kernels.page_pack import PagePack

    whole = PagePack(32, HEAD_DIM, 16, NUM_KV_HEADS, "bfloat16", 0, NUM_KV_HEADS, 16, "bfloat16")
    for name, changed in PACKS.items():
        pack = replace(whole, **changed)
        num_images = PIECE_NBYTES // pack.image_nbytes

        def packed(pack: PagePack = pack, num_images: int = num_images) -> Run:
            num_pages = -(-num_images * pack.dst_page_size // pack.src_page_size)
            pool = torch.zeros(num_pages, pack.src_stride, dtype=torch.uint8, device="cuda")
            order = torch.randperm(num_pages, device="cuda")
            firsts = torch.arange(num_images, device="cuda") * pack.dst_page_size
            out = torch.empty(PIECE_NBYTES, dtype=torch.uint8, device="cuda")
            return lambda: pack_pages(
                pack, pool.data_ptr(), out.data_ptr(), order, firsts, num_programs=PACKER_PROGRAMS
            )

        written = num_images * pack.image_nbytes
        read = written * DTYPE_NBYTES[pack.src_dtype] // DTYPE_NBYTES[pack.dst_dtype]
        yield Case(f"pages packed, {name}, 16 MiB", read + written, packed)

    def unpacked() -> Run:
        pool, scratch = (torch.zeros(PIECE_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        order, heads = torch.randperm(8, device="cuda"), [NUM_KV_HEADS // 2] * 2
        return lambda: unpack_pages(
            pool.view(8, -1),
            order,
            heads,
            scratch,
            num_rows=32 * 2 * 16,
            head_nbytes=2 * HEAD_DIM,
            num_programs=UNPACKER_PROGRAMS,
        )

    yield Case("pages put together of two parts, 16 MiB", 4 * PIECE_NBYTES, unpacked)


TABLES: Final[Mapping[str, Callable[[], Iterator[Case]]]] = {
    "norms": norms,
    "activations": activations,
    "rope_store": rope_store,
    "skinny_gemm": skinny_gemm,
    "skinny_gated_gemm": skinny_gated_gemm,
    "moe": moe,
    "low_rank": low_rank,
    "sampling": sampling,
    "pages": pages,
}
