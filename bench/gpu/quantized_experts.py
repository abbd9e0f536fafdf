"""Experts in FP8 and in integers of four bits against the limits of memory and of matrix products, and their tiles.

Layers of Qwen3-235B-A22B and DeepSeek-V3 on random weights. The bytes of a product are the codes and scales of the
experts that are chosen, what goes in and what comes out; their limit is the speed of a copy in the same run, that of a
prompt a large product. Steps that take turns choose other experts, so that weights come from memory. For each format
both products of a step by the tiles that are served, states quantised in it, and the experts of a layer as a whole; the
same in bfloat16 beside them. `--sweep` measures gates and ups by every tile instead.

    python bench/gpu/quantized_experts.py [--quick] [--sweep] [--json]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor
from triton.runtime.errors import OutOfResources

from diptych.engine.models.matrices.gpu_experts import GroupedExperts, GroupedWeights
from diptych.kernels.gpu.layers.activations import silu_and_mul
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.fp8_experts import FP8_BLOCKS, Fp8Experts, grouped_fp8
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix, pitch_of
from diptych.kernels.gpu.layers.fp8_rows import FP8, quantize_rows
from diptych.kernels.gpu.layers.int4_experts import INT4_BLOCKS, Int4Experts, grouped_int4, pack
from diptych.kernels.gpu.layers.moe import ExpertWeights, align_experts

ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 4096)  # tokens of a step
QUICK: Final = (1, 32, 4096)
SWEPT: Final = (1, 8, 64, 256, 4096)
READ_NBYTES: Final = 1 << 30  # by the steps that take turns: many times the L2 cache
MAX_STEPS: Final = 16
ROUNDS: Final = 8
WARM_S: Final = 0.005
GROUP: Final = 128
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_experts: int
    choices: int
    hidden: int
    ffn: int


MODELS: Final = (Model("Qwen3-235B-A22B", 128, 8, 4096, 1536), Model("DeepSeek-V3", 256, 8, 7168, 2048))


@dataclass(frozen=True, slots=True)
class Kind:
    """A format, how weights in it are made, and what it takes of a weight, bytes."""

    name: str
    make: Callable[[int, int, int], GroupedWeights]  # of so many experts, [n, k]
    weight_nbytes: float
    is_fp8: bool  # on the tensor cores


def random_fp8(group: int, num_experts: int, n: int, k: int) -> Fp8Experts:
    def matrix() -> Fp8Matrix:
        codes = torch.randint(0, 0x70, (n, k), dtype=torch.uint8, device="cuda").view(FP8)
        shape = (n // group, pitch_of(k, group)) if group else (n, 1)
        scales = torch.rand(shape, device="cuda")
        return Fp8Matrix(codes, scales[:, : k // group] if group else scales, group)

    return Fp8Experts.of([matrix() for _ in range(num_experts)])


def random_int4(group: int, num_experts: int, n: int, k: int) -> Int4Experts:
    def matrix() -> Any:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales = torch.rand(n, k // group, device="cuda").bfloat16().float().view(torch.int32) | 8
        return pack(codes, scales, group)

    return Int4Experts.of([matrix() for _ in range(num_experts)])


def random_bfloat16(num_experts: int, n: int, k: int) -> ExpertWeights:
    return ExpertWeights.of(
        [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(num_experts)]
    )


KINDS: Final = (
    Kind("FP8, blocks", partial(random_fp8, GROUP), 1 + 4 / GROUP**2, is_fp8=True),
    Kind("FP8, a scale a row", partial(random_fp8, 0), 1.0, is_fp8=True),
    Kind("INT4, groups of 128", partial(random_int4, GROUP), 0.5 + 4 / GROUP, is_fp8=False),
    Kind("INT4, groups of 32", partial(random_int4, 32), 0.5 + 4 / 32, is_fp8=False),
    Kind("bfloat16", random_bfloat16, 2.0, is_fp8=False),
)


def steps(model: Model, num_tokens: int) -> list[Tensor]:
    """Return what tokens choose in steps that take turns, `[num_tokens, choices]` each."""
    a_step = min(model.num_experts, num_tokens * model.choices) * model.hidden * model.ffn // 2
    count = max(2, min(MAX_STEPS, READ_NBYTES // a_step))
    if num_tokens * model.choices <= model.num_experts // 4:  # so few that no two of them need choose alike
        wanted = count * num_tokens * model.choices
        order = torch.cat([torch.randperm(model.num_experts, device="cuda") for _ in range(0, wanted, 64)])
        return list(order[:wanted].view(count, num_tokens, model.choices))
    shape = num_tokens, model.num_experts
    return [torch.rand(shape, device="cuda").topk(model.choices).indices for _ in range(count)]


def num_read(chosen: Sequence[Tensor]) -> float:
    """Return how many experts a step reads, the mean of all."""
    return sum(len(set(each.flatten().tolist())) for each in chosen) / len(chosen)


def least_s(limits: Roofline, kind: Kind, weights: GroupedWeights, chosen: Sequence[Tensor], repeats: int) -> float:
    (n, k), rows = weights.shape, chosen[0].numel()
    moved = num_read(chosen) * n * k * kind.weight_nbytes + 2 * (rows // repeats * k + rows * n)
    flops_s = limits.fp8_flops_s if kind.is_fp8 else limits.bf16_flops_s
    return max(moved / limits.copy_bytes_s, 2.0 * rows * n * k / flops_s)


def product_runs(weights: GroupedWeights, chosen: Sequence[Tensor], repeats: int, block: int) -> list[Run]:
    (n, k), rows = weights.shape, chosen[0].numel()
    x = torch.randn(rows // repeats, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    return [partial(weights.multiply, x, align_experts(each, weights.num_experts, block), each, out) for each in chosen]


def layer_runs(model: Model, experts: GroupedExperts, chosen: Sequence[Tensor]) -> list[Run]:
    x = torch.randn(len(chosen[0]), model.hidden, device="cuda").bfloat16()
    shares, out = torch.full(chosen[0].shape, 1 / model.choices, device="cuda").bfloat16(), torch.empty_like(x)
    return [partial(experts.forward, x, each, shares, out) for each in chosen]


def row(report: Report, case: str, took_s: float, limit_s: float) -> None:
    report.row("gpu/experts", case, took_s * 1e6, "us", limit_s * 1e6, "bytes by a copy, or product", limit_s / took_s)


def served(report: Report, limits: Roofline, model: Model, kind: Kind, cases: Sequence[int]) -> None:
    """Measure each product, and the experts of a layer as a whole."""
    both = (
        kind.make(model.num_experts, 2 * model.ffn, model.hidden),
        kind.make(model.num_experts, model.hidden, model.ffn),
    )
    for num_tokens in cases:
        chosen, total = steps(model, num_tokens), 0.0
        block = max(each.block(num_tokens * model.choices) for each in both)
        for name, weights, repeats in zip(("gate_up", "down"), both, (model.choices, 1), strict=True):
            limit_s = least_s(limits, kind, weights, chosen, repeats)
            total += limit_s
            took_s = seconds_each(product_runs(weights, chosen, repeats, block), ROUNDS, WARM_S)
            row(report, f"{model.name}, {kind.name}: {name}, {num_tokens} tokens", took_s, limit_s)
        took_s = seconds_each(layer_runs(model, GroupedExperts(*both, silu_and_mul), chosen), ROUNDS, WARM_S)
        row(report, f"{model.name}, {kind.name}: experts of a layer, {num_tokens} tokens", took_s, total)


def tiles(kind: Kind, num_tokens: int) -> Iterator[tuple[int, Tile]]:
    """Yield blocks of tokens and tiles that could do."""
    few = [(32, 4), (64, 4), (128, 4), (128, 8)] if kind.is_fp8 else [(64, 2), (64, 4), (128, 4), (128, 8)]
    many = [(128, 4), (128, 8), (128, 16), (256, 16)] if kind.is_fp8 else [(64, 4), (128, 4), (128, 8), (256, 8)]
    shapes, stages = (few, (3, 4, 6)) if num_tokens <= 256 else (many, (3, 4, 5))
    blocks = {1: (8, 16), 8: (8, 16), 64: (8, 16, 32), 256: (16, 32), 4096: (64, 128)}[num_tokens]
    widths = (GROUP, 2 * GROUP) if kind.name.endswith("row") and num_tokens <= 64 else (GROUP,)
    for block, (block_n, warps), width, num_stages in itertools.product(blocks, shapes, widths, stages):
        if block in (FP8_BLOCKS if kind.is_fp8 else INT4_BLOCKS):
            yield block, Tile(block_n, width, num_stages, warps)


def sweep(report: Report, limits: Roofline, model: Model, kind: Kind, cases: Sequence[int]) -> None:
    """Measure gates and ups by every tile that fits, the best last."""
    weights = kind.make(model.num_experts, 2 * model.ffn, model.hidden)
    for num_tokens in cases:
        chosen, found = steps(model, num_tokens), []
        for block, tile in tiles(kind, num_tokens):
            try:
                took_s = seconds_each(tile_runs(weights, chosen, model.choices, block, tile), ROUNDS, 0.003)
            except OutOfResources:
                continue
            found.append(
                (took_s, f"block {block} tile {tile.block_n}x{tile.block_k} s{tile.num_stages} w{tile.num_warps}")
            )
        for took_s, name in sorted(found, reverse=True)[-6:]:
            limit_s = least_s(limits, kind, weights, chosen, model.choices)
            row(report, f"{model.name}, {kind.name}: gate_up, {num_tokens} tokens, {name}", took_s, limit_s)


def tile_runs(weights: GroupedWeights, chosen: Sequence[Tensor], repeats: int, block: int, tile: Tile) -> list[Run]:
    (n, k), rows = weights.shape, chosen[0].numel()
    x = torch.randn(rows // repeats, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    aligned = [align_experts(each, weights.num_experts, block) for each in chosen]
    if isinstance(weights, Fp8Experts):
        quantized = quantize_rows(x, weights.matrices[0].group)
        return [partial(grouped_fp8, quantized, weights, each, out, tile=tile) for each in aligned]
    assert isinstance(weights, Int4Experts)
    return [partial(grouped_int4, x, weights, each, out, tile=tile) for each in aligned]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="tiles")
    options, limits = parser.parse_args(), roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        if options.sweep:
            for kind in KINDS[:4]:
                sweep(report, limits, MODELS[0], kind, SWEPT[1::3] if options.quick else SWEPT)
            return
        for model, kind in itertools.product(MODELS, KINDS):
            served(report, limits, model, kind, QUICK if options.quick else ROWS)


if __name__ == "__main__":
    main()
