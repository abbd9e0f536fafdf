"""gpt-oss-120b's experts in MXFP4 against the limits of memory and of matrix products, and the tiles that could do it.

128 experts of 2880 x 2880, four a token, on random weights. The bytes of a product are the codes and scales of the
experts that are chosen, what goes in and what comes out; their limit is the speed of a copy in the same run. Steps that
take turns choose other experts, so that weights come from memory. Each product by the tile that is served, and the
experts of a layer as a whole, with what puts tokens in order, biases, activation and sum; expanded experts beside them;
last the product of gates and ups by every tile, for few requests and for a prompt, whose limit is a large product.

    python bench/gpu/mxfp4_experts.py [--quick] [--json]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor
from triton.runtime.errors import OutOfResources

from diptych.engine.models.matrices.gpu_experts import GroupedExperts
from diptych.kernels.gpu.layers.activations import clamped_swiglu
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.moe import ExpertWeights, align_experts
from diptych.kernels.gpu.layers.mxfp4_experts import Mxfp4Experts, Mxfp4Matrix, grouped_mxfp4, pack, tile_of, unpack
from diptych.kernels.quantized import MXFP4_GROUP, STRIP

NUM_EXPERTS: Final = 128
CHOICES: Final = 4
SIZE: Final = 2880  # of states, and of what gates leave
SHAPES: Final = {"gate_up": (2 * SIZE, SIZE), "down": (SIZE, SIZE)}
REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64)
SWEPT: Final = (1, 2, 8, 64)  # requests
PROMPTS: Final = (128, 256, 512, 2048, 8192)  # tokens of a step
READ_NBYTES: Final = 512 << 20  # by the steps that take turns: many times the L2 cache
MAX_STEPS: Final = 32
SWEEP_ROUNDS: Final = 8
FEW: Final = tuple(
    Tile(block_n, STRIP, stages, warps)
    for (block_n, warps), stages in itertools.product(
        ((32, 2), (64, 1), (64, 2), (64, 4), (128, 2), (128, 4), (256, 4)), (3, 4, 5, 6)
    )
)
MANY: Final = tuple(
    Tile(block_n, STRIP, stages, warps)
    for (block_n, warps), stages in itertools.product(((64, 4), (128, 4), (128, 8), (256, 8)), (2, 3, 4))
)
Run = Callable[[], object]


def random_experts(n: int, k: int) -> Mxfp4Experts:
    """Return codes and scales as a checkpoint of such a model has them."""

    def matrix() -> Mxfp4Matrix:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        return pack(codes, torch.randint(115, 121, (n, k // MXFP4_GROUP), dtype=torch.uint8, device="cuda"))

    return Mxfp4Experts.of([matrix() for _ in range(NUM_EXPERTS)])


def expanded(experts: Mxfp4Experts) -> ExpertWeights:
    return ExpertWeights.of([unpack(matrix).bfloat16() for matrix in experts.matrices])


def steps(num_tokens: int) -> list[Tensor]:
    """Return what tokens choose in steps that take turns, `[num_tokens, CHOICES]` each."""
    a_step = min(NUM_EXPERTS, num_tokens * CHOICES) * SIZE * SIZE // 2
    count = max(2, min(MAX_STEPS, READ_NBYTES // a_step))
    order = torch.randperm(NUM_EXPERTS, device="cuda").repeat(count * num_tokens * CHOICES // NUM_EXPERTS + 1)
    if num_tokens * CHOICES <= NUM_EXPERTS // 4:  # so few that no two of them need choose alike
        return list(order[: count * num_tokens * CHOICES].view(count, num_tokens, CHOICES))
    return [torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(CHOICES).indices for _ in range(count)]


def num_read(chosen: Sequence[Tensor]) -> float:
    """Return how many experts a step reads, the mean of all."""
    return sum(len(set(each.flatten().tolist())) for each in chosen) / len(chosen)


def nbytes(n: int, k: int, chosen: Sequence[Tensor], repeats: int) -> float:
    """Return the bytes that a product of a step must move, the mean of all."""
    read = num_read(chosen)
    rows = chosen[0].numel()
    return read * n * k * (4 / 8 + 1 / MXFP4_GROUP) + 2 * (rows // repeats * k + rows * n)


def product_runs(
    weights: Mxfp4Experts, chosen: Sequence[Tensor], repeats: int, block: int, tile: Tile | None = None
) -> list[Run]:
    n, k = weights.shape
    rows = chosen[0].numel()
    x = torch.randn(rows // repeats, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    aligned = [align_experts(each, NUM_EXPERTS, block) for each in chosen]
    return [partial(grouped_mxfp4, x, weights, each, out, tile=tile) for each in aligned]


def sweep(report: Report, limits: Roofline, weights: Mxfp4Experts, num_tokens: int, tiles: Sequence[Tile]) -> None:
    """Measure gates and ups by every tile that fits."""
    chosen = steps(num_tokens)
    block, (n, k) = weights.block(num_tokens * CHOICES), weights.shape
    present = tile_of(block, torch.bfloat16, len(align_experts(chosen[0], NUM_EXPERTS, block).experts) * n)
    moved, flops = nbytes(n, k, chosen, CHOICES), 2.0 * num_tokens * CHOICES * n * k
    for tile in tiles:
        try:
            took_s = seconds_each(product_runs(weights, chosen, CHOICES, block, tile), SWEEP_ROUNDS, 0.003)
        except OutOfResources:
            continue
        chosen_by_rule = ", served" if tile == present else ""
        case = f"tile {tile.block_n} s{tile.num_stages} w{tile.num_warps}{chosen_by_rule}: gate_up, {num_tokens} tokens"
        row(report, limits, case, took_s, moved, flops)


def row(report: Report, limits: Roofline, case: str, took_s: float, moved: float, flops: float, **peers: float) -> None:
    least_s = limits.seconds(moved, flops)
    what = "its bytes by a copy" if moved / limits.copy_bytes_s == least_s else "bf16 product"
    others = {name: each * 1e6 for name, each in peers.items()}
    report.row("gpu/mxfp4", case, took_s * 1e6, "us", least_s * 1e6, what, least_s / took_s, others)


def served(report: Report, limits: Roofline, both: dict[str, Mxfp4Experts], num_tokens: int) -> None:
    """Measure each product, and the experts of a layer as a whole, beside expanded ones."""
    chosen, block, total = steps(num_tokens), both["down"].block(num_tokens * CHOICES), 0.0
    flops = 2.0 * num_tokens * CHOICES * SIZE * SIZE
    for (name, weights), repeats in zip(both.items(), (CHOICES, 1), strict=True):
        moved, took_s = (
            nbytes(*weights.shape, chosen, repeats),
            seconds_each(product_runs(weights, chosen, repeats, block)),
        )
        total += moved
        row(report, limits, f"{name}, {num_tokens} tokens", took_s, moved, flops * weights.shape[0] / SIZE)
    took_s = seconds_each(layer_runs(GroupedExperts(both["gate_up"], both["down"], swiglu, bias()), chosen))
    row(report, limits, f"experts of a layer, {num_tokens} tokens", took_s, total, 3 * flops)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    clamped_swiglu(gate_up, out, alpha=1.702, limit=7.0)


def bias() -> Tensor:
    return torch.randn(NUM_EXPERTS, 2 * SIZE, device="cuda").bfloat16()


def layer_runs(experts: GroupedExperts, chosen: Sequence[Tensor]) -> list[Run]:
    x = torch.randn(len(chosen[0]), SIZE, device="cuda").bfloat16()
    shares, out = torch.full(chosen[0].shape, 1 / CHOICES, device="cuda").bfloat16(), torch.empty_like(x)
    return [partial(experts.forward, x, each, shares, out) for each in chosen]


def wide(report: Report, limits: Roofline, both: dict[str, Mxfp4Experts], cases: Sequence[int]) -> None:
    """Measure what is expanded to bfloat16: the same experts in four times the memory."""
    experts = GroupedExperts(expanded(both["gate_up"]), expanded(both["down"]), swiglu, bias())
    for num_tokens in cases:
        chosen, flops = steps(num_tokens), 6.0 * num_tokens * CHOICES * SIZE * SIZE
        took_s = seconds_each(layer_runs(experts, chosen))
        case = f"expanded to bfloat16: experts of a layer, {num_tokens} tokens"
        row(report, limits, case, took_s, num_read(chosen) * 3 * SIZE * SIZE * 2, flops)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits, both = roofline(), {name: random_experts(*shape) for name, shape in SHAPES.items()}
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for num_tokens in REQUESTS[::3] if options.quick else (*REQUESTS, *PROMPTS):
            served(report, limits, both, num_tokens)
        if not options.quick:
            wide(report, limits, both, (1, 8, 64, 2048))
            for num_tokens in SWEPT:
                sweep(report, limits, both["gate_up"], num_tokens, FEW)
            sweep(report, limits, both["gate_up"], PROMPTS[-1], MANY)


if __name__ == "__main__":
    main()
