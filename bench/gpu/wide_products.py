"""Products of many rows at the shapes of Llama-3-8B: what torch runs, beside the fastest that cuBLASLt has.

cuBLASLt is asked for all that it would try, each is timed, and the fastest few take turns with torch's ways, so that
clocks that sink under load sink for all of them.

    python bench/gpu/wide_products.py [--json]
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from report import Report, arguments

SHAPES: Final = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}  # out, in
ROWS: Final = (4096, 8192)
WORKSPACE_NBYTES: Final = 64 << 20
MOST: Final = 24  # algorithms that are timed
FINAL: Final = 3  # that take turns with torch
REPEATS: Final = 3
ROUNDS: Final = 6
COMPUTE_32F, R_32F, R_16BF, TRANS_A, TRANSPOSED, MAX_WORKSPACE = 68, 0, 14, 3, 1, 1  # cublasLt.h


class Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Lt:
    """`x[rows, in] @ weight[out, in].T` by cuBLASLt."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")
        maps = Path("/proc/self/maps").read_text().split()
        self._library = ctypes.CDLL(next(path for path in maps if "libcublasLt.so" in path))
        self._handle = self._new("cublasLtCreate")
        self._workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device="cuda")

    def _call(self, name: str, *values: Any) -> None:
        status = getattr(self._library, name)(*values)
        if status:
            raise RuntimeError(f"{name}: {status}")

    def _new(self, name: str, *values: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *values)
        return made

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        size = ctypes.c_uint64
        return self._new("cublasLtMatrixLayoutCreate", R_16BF, size(rows), size(columns), ctypes.c_int64(rows))

    def runs(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """One for each algorithm, in the order that the library thinks best."""
        (rows, inner), wide = x.shape, len(weight)
        product = self._new("cublasLtMatmulDescCreate", COMPUTE_32F, R_32F)
        self._call(
            "cublasLtMatmulDescSetAttribute",
            product,
            TRANS_A,
            ctypes.byref(ctypes.c_int(TRANSPOSED)),
            ctypes.c_size_t(4),
        )
        layouts = self._layout(inner, wide), self._layout(inner, rows), self._layout(wide, rows)
        wishes = self._new("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE_NBYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", wishes, MAX_WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(8)
        )
        found, count = (Found * MOST)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            product,
            *layouts,
            layouts[2],
            wishes,
            MOST,
            found,
            ctypes.byref(count),
        )

        def run(each: Found) -> Callable[[], object]:
            one, zero, pointer = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_void_p
            return lambda: self._call(
                "cublasLtMatmul",
                self._handle,
                product,
                ctypes.byref(one),
                pointer(weight.data_ptr()),
                layouts[0],
                pointer(x.data_ptr()),
                layouts[1],
                ctypes.byref(zero),
                pointer(out.data_ptr()),
                layouts[2],
                pointer(out.data_ptr()),
                layouts[2],
                ctypes.byref(each.algorithm),
                pointer(self._workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_NBYTES),
                pointer(torch.cuda.current_stream().cuda_stream),
            )

        return [run(each) for each in found[: count.value]]


def seconds(run: Callable[[], object]) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(REPEATS):
        run()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3 / REPEATS


def by_library(library: str, run: Callable[[], object]) -> Callable[[], object]:
    def switched() -> None:
        torch.backends.cuda.preferred_blas_library(library)
        run()
        torch.backends.cuda.preferred_blas_library("default")

    return switched


def measure(report: Report, lt: Lt, name: str, rows: int) -> None:
    wide, inner = SHAPES[name]
    x, weight = (torch.randn(n, inner, dtype=torch.bfloat16, device="cuda") for n in (rows, wide))
    out = torch.empty(rows, wide, dtype=torch.bfloat16, device="cuda")
    expected = x @ weight.T
    own = lt.runs(x, weight, out)
    for run in own:
        run()
    assert torch.equal(out, expected) or (out - expected).abs().max() < 0.02 * expected.abs().max()
    times = [seconds(run) for run in own]
    fastest = sorted(range(len(own)), key=times.__getitem__)[:FINAL]

    def plain() -> None:
        torch.mm(x, weight.T, out=out)

    ways: dict[str, Callable[[], object]] = {
        "torch": plain,
        "torch, cublas": by_library("cublas", plain),
        "torch, cublaslt": by_library("cublaslt", plain),
        **{f"cublaslt {i}": own[i] for i in sorted({0, *fastest})},
    }
    rounds = [{way: seconds(run) for way, run in ways.items()} for _ in range(ROUNDS)]
    speeds = {way: 2 * rows * wide * inner / statistics.median(each[way] for each in rounds) for way in ways}
    best = max(speed for way, speed in speeds.items() if way.startswith("cublaslt"))
    value = speeds.pop("torch")
    case, peers = f"{name}, {rows} rows", {way: speed / 1e12 for way, speed in speeds.items()}
    report.row("gpu/wide_products", case, value / 1e12, "TFLOP/s", best / 1e12, "best of cuBLASLt", value / best, peers)


def main() -> None:
    options = arguments(__doc__).parse_args()
    lt = Lt()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for rows in ROWS:
            for name in SHAPES:
                measure(report, lt, name, rows)


if __name__ == "__main__":
    main()
