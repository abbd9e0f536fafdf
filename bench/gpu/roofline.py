"""What this GPU can do: bytes/s of a copy, flop/s of matrix products. The limits beside every other number here.

Measured once in a run: with `DIPTYCH_ROOFLINE_FILE` the first process writes them there, the others read them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from device_clock import seconds_each, seconds_eager
from report import Report, arguments

FILE_VARIABLE: Final = "DIPTYCH_ROOFLINE_FILE"
COPY_NBYTES: Final = 4 << 30
SIZE: Final = 8192  # of the square matrices


@dataclass(frozen=True, slots=True)
class Roofline:
    """What one GPU reaches on random data."""

    name: str
    copy_bytes_s: float  # read and written both count
    bf16_flops_s: float
    fp8_flops_s: float  # 0: not measured

    def seconds(self, nbytes: float, flops: float = 0.0) -> float:
        """Return how long work that moves and computes so much, in bf16, must take."""
        return max(nbytes / self.copy_bytes_s, flops / self.bf16_flops_s)


def roofline() -> Roofline:
    """Return the limits of the current GPU, measured now or earlier in this run."""
    limits = recorded()
    if limits is None:
        limits = measure()
        if path := _path():
            path.write_text(json.dumps(asdict(limits)))
    return limits


def recorded() -> Roofline | None:
    """Return what was measured earlier in this run, if anything was. Touches no GPU."""
    path = _path()
    return Roofline(**json.loads(path.read_text())) if path and path.exists() else None


def _path() -> Path | None:
    return Path(os.environ[FILE_VARIABLE]) if FILE_VARIABLE in os.environ else None


def measure() -> Roofline:
    return Roofline(torch.cuda.get_device_name(), copy_bytes_s(), _flops_s(_bf16_product()), fp8_flops_s())


def copy_bytes_s() -> float:
    source = torch.empty(COPY_NBYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_NBYTES / seconds_eager(lambda: target.copy_(source))  # in a graph a copy engine does it, slower


def fp8_flops_s() -> float:
    """0, and a line on stderr, where this torch can't multiply fp8."""
    try:
        return _flops_s(_fp8_product())
    except (RuntimeError, AttributeError) as error:
        print(f"no fp8 product: {error}", file=sys.stderr)
        return 0.0


def _flops_s(product: Callable[[], object]) -> float:
    return 2 * SIZE**3 / seconds_each([product])


def _bf16_product() -> Callable[[], object]:
    x, weight = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    return lambda: torch.mm(x, weight.T, out=out)


def _fp8_product() -> Callable[[], object]:
    x, weight = (torch.randn(SIZE, SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(x, weight.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    with Report(as_json=options.json) as report:
        report.row("gpu/roofline", "copy, 4 GiB", limits.copy_bytes_s / 1e9, "GB/s")
        report.row("gpu/roofline", f"bf16 product, {SIZE}", limits.bf16_flops_s / 1e12, "TFLOP/s")
        report.row("gpu/roofline", f"fp8 product, {SIZE}", limits.fp8_flops_s / 1e12, "TFLOP/s")


if __name__ == "__main__":
    main()
