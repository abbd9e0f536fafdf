"""Products with weights in integers of Llama-3-8B's shapes, states in bfloat16: ours, and cuBLAS with bfloat16 weights.

Few rows against one read of the weight, as kept, at copy speed; many against the rate of a large product in the same
run. *tile*: the product with codes, whatever the number of rows; *widened*: expanded a part at a time, for cuBLAS. A
weight is read from memory each time.

    python bench/gpu/integer_products.py [--quick] [--json]
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import numpy as np
import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline

from diptych.engine.models.matrices.gpu_integers import GpuIntegers
from diptych.kernels.quantized import Code, QuantizedArray

SHAPES: Final = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 4096)
READ_NBYTES: Final = 256 << 20  # by each measurement: several times the L2 cache
FORMATS: Final[dict[str, tuple[Code, int, bool]]] = {  # code, group, whether there are mins
    "int4, groups of 128": ("int4", 128, False),
    "int4, groups of 32 with mins": ("int4", 32, True),
    "int8, groups of 32": ("int8", 32, False),
}


def random_array(n: int, k: int, code: Code, group: int, *, has_mins: bool) -> QuantizedArray:
    """Return a weight whose products are of a usual size; scales are in float16 where there are no mins."""
    random = np.random.default_rng(n)
    largest = 7 if code == "int4" else 127
    scales = random.uniform(0.5, 1.5, (n, k // group)).astype(np.float32) / (largest * math.sqrt(k))
    if not has_mins:
        codes = random.integers(-largest - 1, largest + 1, (n, k), np.int8)
        return QuantizedArray(code, codes, scales.astype(np.float16), None, group)
    codes = random.integers(0, 2 * largest + 2, (n, k), np.uint8)
    return QuantizedArray(code, codes, scales, -largest * scales, group)


def weights(n: int, k: int, name: str) -> list[GpuIntegers]:
    """Return as many as the L2 cache can't hold."""
    code, group, has_mins = FORMATS[name]
    array = random_array(n, k, code, group, has_mins=has_mins)
    found = [GpuIntegers.of(array, torch.bfloat16, torch.device("cuda"))]
    while len(found) < max(2, math.ceil(READ_NBYTES / (n * k // 2))):
        found.append(GpuIntegers.of(array, torch.bfloat16, torch.device("cuda")))
    return [each for each in found if each is not None]


def measure(report: Report, limits: Roofline, case: str, all_weights: list[GpuIntegers], m: int) -> None:
    n, k = all_weights[0].shape
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    took = seconds_each([partial(each.multiply, x, out) for each in all_weights])
    wide = [each.dense() for each in all_weights[: max(2, len(all_weights) // 4)]]
    peers = {"cuBLAS": seconds_each([partial(torch.mm, x, each.T, out=out) for each in wide]) * 1e6}
    peers["widened"] = seconds_each([partial(each.multiply_widened, x, out) for each in all_weights[:4]]) * 1e6
    nbytes = all_weights[0].nbytes + 2 * m * (k + n)
    least = limits.seconds(nbytes, 2 * m * n * k)
    report.row("gpu/int", f"{case}, {m} rows", took * 1e6, "us", least * 1e6, "bytes or product", least / took, peers)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    for name in FORMATS:
        for part, (n, k) in SHAPES.items():
            all_weights = weights(n, k, name)
            with Report(as_json=options.json) as report:
                for m in ROWS[:: 2 if options.quick else 1]:
                    measure(report, limits, f"{part} {n}x{k}, {name}", all_weights, m)


if __name__ == "__main__":
    main()
