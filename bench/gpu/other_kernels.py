"""Every other kernel of a step against the bytes that it must move, at the sizes of Llama-3-8B, with cuBLAS and torch.

(Not `kernels.py`: transformers looks for a package of that name.) A kind of kernels that fails costs no other.

    python bench/gpu/other_kernels.py [--only norms skinny_gemm ...] [--json]
"""

from __future__ import annotations

import sys
import traceback
from typing import Final

import torch
from device_clock import seconds_each
from kernel_cases import TABLES, Case
from report import Report, arguments
from roofline import Roofline, roofline

TURNS_NBYTES: Final = 512 << 20  # together, many times what an L2 cache holds
MIN_TURNS: Final = 4  # the begin of a graph is in the first


def measure(report: Report, limits: Roofline, case: Case) -> None:
    turns = max(MIN_TURNS, min(256, round(TURNS_NBYTES / case.nbytes)))
    seconds = seconds_each([case.make() for _ in range(turns)])
    peers = {name: 1e6 * seconds_each([make() for _ in range(turns)]) for name, make in case.peers.items()}
    limit = limits.seconds(case.nbytes, case.flops)
    what = "bytes" if limit == limits.seconds(case.nbytes) else "flops"
    report.row("gpu/kernels", case.name, 1e6 * seconds, "us", 1e6 * limit, what, limit / seconds, peers)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    limits = roofline()
    for name in options.only:
        with torch.inference_mode(), Report(as_json=options.json) as report:
            try:
                for case in TABLES[name]():
                    measure(report, limits, case)
            except Exception:
                print(f"{name} failed:", file=sys.stderr)
                traceback.print_exc()


if __name__ == "__main__":
    main()
