"""Products with FP8 weights of Llama-3-8B's shapes, rows quantised on the fly: ours, cuBLAS in bfloat16, torch's FP8.

Few rows against one read of the weight at copy speed; many against the rate of a large FP8 product in the same run.
*cuBLAS* multiplies the same shapes in bfloat16. *torch FP8* is `_scaled_mm` of rows that were quantised before, with
a scale a row, or with scales of blocks as DeepSeek-V3 has them. A weight is read from memory each time.

    python bench/gpu/fp8_products.py [--quick] [--json]
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.kernels.gpu.layers.fp8_gemm import fp8_gemm, library_gemm
from diptych.kernels.gpu.layers.fp8_gemv import fp8_gated_gemv
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import GROUP, quantize_rows

SHAPES: Final = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
LM_HEAD: Final = {"lm_head": (128_256, 4096)}
ROWS: Final = (1, 8, 16, 64, 256, 4096, 8192)
READ_NBYTES: Final = 256 << 20  # by each measurement: several times the L2 cache
KINDS: Final = {0: "a scale a row", GROUP: "blocks"}


def weights(n: int, k: int, group: int) -> list[Fp8Matrix]:
    found = []
    for _ in range(max(2, math.ceil(READ_NBYTES / (n * k)))):
        made = Fp8Matrix.made(torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / math.sqrt(k))
        found.append(Fp8Matrix(made.codes, _blocks(n, k), group) if group else made)
    return found


def _blocks(n: int, k: int) -> Tensor:
    return torch.full((n // GROUP, k // GROUP), 1e-3, device="cuda")  # as aligned as `Fp8Matrix.of` makes them


def measure(report: Report, limits: Roofline, name: str, all_weights: list[Fp8Matrix], m: int) -> None:
    (n, k), group = all_weights[0].shape, all_weights[0].group
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    rows = quantize_rows(x, group)
    took = seconds_each([partial(fp8_gemm, x, weight, out) for weight in all_weights])
    peers = {"cuBLAS": bf16_s(x, all_weights, out) * 1e6}
    try:
        peers["torch FP8"] = seconds_each([partial(library_gemm, rows, each, out) for each in all_weights]) * 1e6
    except (RuntimeError, ValueError) as error:
        print(f"no FP8 product of torch: {str(error)[:200]}", flush=True)
    peers["quantised"] = seconds_each([partial(quantize_rows, x, group)] * 8) * 1e6
    least = max((n * k + 2 * m * (k + n)) / limits.copy_bytes_s, 2 * m * n * k / limits.fp8_flops_s)
    case = f"{name} {n}x{k}, {KINDS[group]}, {m} rows"
    report.row("gpu/fp8", case, took * 1e6, "us", least * 1e6, "bytes or product", least / took, peers)


def bf16_s(x: Tensor, all_weights: list[Fp8Matrix], out: Tensor) -> float:
    wide = [each.codes.to(torch.bfloat16) for each in all_weights[: max(2, len(all_weights) // 2)]]
    return seconds_each([partial(torch.mm, x, each.T, out=out) for each in wide])


def measure_gated(report: Report, limits: Roofline, all_weights: list[Fp8Matrix]) -> None:
    (n, k), group = all_weights[0].shape, all_weights[0].group
    x = torch.randn(1, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, n // 2, dtype=torch.bfloat16, device="cuda")
    took = seconds_each([partial(fp8_gated_gemv, x, each, out, "silu") for each in all_weights])
    least = n * k / limits.copy_bytes_s
    case = f"gates and ups {n}x{k}, activated, {KINDS[group]}, 1 row"
    report.row("gpu/fp8", case, took * 1e6, "us", least * 1e6, "bytes at copy speed", least / took)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits, shapes = roofline(), SHAPES | ({} if options.quick else LM_HEAD)
    for group in KINDS:
        for name, (n, k) in shapes.items():
            all_weights = weights(n, k, group)
            with Report(as_json=options.json) as report:
                for m in ROWS:
                    measure(report, limits, name, all_weights, m)
                if name == "gate_up":
                    measure_gated(report, limits, all_weights)


if __name__ == "__main__":
    main()
