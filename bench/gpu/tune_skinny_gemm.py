"""Products of 1 and 16 rows with the weights of Llama-3-8B: ours and cuBLAS, as a share of the bandwidth of a copy.

First the products, norms and activations of a decode step's layers, one after the other; then each product alone, by
the tile that `choose_tile` chooses and by the fastest of a sweep; last the winners, and what all products take.
`--quick` sweeps nothing. About a minute on a machine of 16 cores, which compile the tiles. A weight is read from memory
each time: as many of it take turns as the L2 cache can't hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from device_clock import ROUNDS, WARM_S, seconds_each
from report import Report, arguments
from roofline import roofline
from skinny_layers import Layer, run_of
from skinny_tiles import compile_all, tiles
from torch import Tensor
from triton.runtime.errors import OutOfResources

from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.skinny_gemm import choose_tile, pays_up_to, skinny_gemm

NUM_LAYERS: Final = 32
SHAPES: Final = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
LM_HEAD: Final = {"lm_head": (128_256, 4096)}
ROWS: Final = (1, 16)
READ_NBYTES: Final = 512 << 20  # by each measurement: many times the L2 cache
FINALISTS: Final = 5  # of one row: measured again, and with more rows
SWEEP_ROUNDS: Final = 8
SWEEP_WARM_S: Final = 0.003  # the one before has warmed the GPU
CHAIN_LAYERS: Final = 4  # 1.7 GB of weights

Multiply = Callable[[Tensor, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Winner:
    """Seconds of a product, for each of `ROWS`."""

    tile: Tile
    best_s: list[float]
    chosen_s: list[float]
    cublas_s: list[float]


def main() -> None:
    options = arguments(__doc__).parse_args()
    shapes, copied = SHAPES | LM_HEAD, roofline().copy_bytes_s
    with Report(as_json=options.json) as report:
        _layers(report, copied)
    if not options.quick:
        compile_all((tile, k) for _, k in shapes.values() for tile in tiles(k))
    winners = {}
    for name, (n, k) in shapes.items():
        with Report(as_json=options.json) as report:
            winners[name] = _product(report, f"{name} {n}x{k}", _weights(n, k), copied, sweeps=not options.quick)
    with Report(as_json=options.json) as report:
        _summary(report, winners, copied)


def _layers(report: Report, copied: float) -> None:
    """As served: ours where they pay."""
    shapes = list(SHAPES.values())
    layers = [Layer(*(_weight(n, k) for n, k in shapes)) for _ in range(CHAIN_LAYERS)]
    least_s = sum(2 * n * k for n, k in shapes) / copied
    for m in ROWS:
        took = {
            name: seconds_each([run_of(layer, m, name) for layer in layers]) for name in ("cuBLAS", "ours", "served")
        }
        peers = {"all products ours": took["ours"] * 1e6, "cuBLAS": took["cuBLAS"] * 1e6}
        _row(report, f"layer without attention, m {m}", took["served"], least_s, peers)


def _weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / math.sqrt(k)


def _weights(n: int, k: int) -> list[Tensor]:
    return [_weight(n, k) for _ in range(max(2, math.ceil(READ_NBYTES / (2 * n * k))))]


def _product(report: Report, case: str, weights: list[Tensor], copied: float, *, sweeps: bool) -> Winner:
    n, k = weights[0].shape
    chosen, cublas = choose_tile(n), [_seconds(_cublas, weights, m) for m in ROWS]
    found = {tile: _both(tile, weights) for tile in [chosen, *(_finalists(weights) if sweeps else ())]}
    for tile, took in found.items():
        for m, took_s, cublas_s in zip(ROWS, took, cublas, strict=True):
            peers = {"cuBLAS": cublas_s * 1e6}
            _row(report, f"{case}, m {m}, {_name(tile)}", took_s, _least_s(n, k, m, copied), peers)
    best = min(found, key=lambda tile: sum(found[tile]))
    return Winner(best, found[best], found[chosen], cublas)


def _finalists(weights: list[Tensor]) -> list[Tile]:
    """Return the tiles that take the least time for one row."""
    speeds: dict[Tile, float] = {}
    for tile in tiles(weights[0].shape[1]):
        try:
            speeds[tile] = _seconds(partial(skinny_gemm, tile=tile), weights, 1, SWEEP_ROUNDS, SWEEP_WARM_S)
        except OutOfResources:
            continue
    return sorted(speeds, key=speeds.__getitem__)[:FINALISTS]


def _both(tile: Tile, weights: list[Tensor]) -> list[float]:
    return [_seconds(partial(skinny_gemm, tile=tile), weights, m) for m in ROWS]


def _seconds(multiply: Multiply, weights: list[Tensor], m: int, rounds: int = ROUNDS, warm_s: float = WARM_S) -> float:
    n, k = weights[0].shape
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    return seconds_each([partial(multiply, x, weight, out) for weight in weights], rounds, warm_s)


def _cublas(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def _least_s(n: int, k: int, m: int, copied: float) -> float:
    return 2 * (n * k + m * k + m * n) / copied


def _summary(report: Report, winners: Mapping[str, Winner], copied: float) -> None:
    """Report each product, and all in a step: as served, which is cuBLAS where ours does not pay."""
    shapes, totals = SHAPES | LM_HEAD, [[0.0] * len(ROWS) for _ in range(4)]
    for name, won in winners.items():
        times = 1 if name in LM_HEAD else NUM_LAYERS
        for i, m in enumerate(ROWS):
            served_s = (won.chosen_s if m <= pays_up_to(*shapes[name]) else won.cublas_s)[i]
            columns = (served_s, won.best_s[i], won.cublas_s[i], _least_s(*shapes[name], m, copied))
            _summed(report, f"{name}, m {m}, fastest tile {_name(won.tile)}", columns)
            for total, took_s in zip(totals, columns, strict=True):
                total[i] += times * took_s
    for i, m in enumerate(ROWS):
        _summed(report, f"all products of a step, m {m}", [total[i] for total in totals])


def _summed(report: Report, case: str, columns: Sequence[float]) -> None:
    served_s, best_s, cublas_s, least_s = columns
    _row(report, f"served: {case}", served_s, least_s, {"fastest tile": best_s * 1e6, "cuBLAS": cublas_s * 1e6})


def _name(tile: Tile) -> str:
    """Rows x columns of a stage, stages, warps."""
    return f"{tile.block_n}x{tile.block_k} s{tile.num_stages} w{tile.num_warps}"


def _row(report: Report, case: str, took_s: float, least_s: float, peers: Mapping[str, float]) -> None:
    limit_is = "its bytes by a copy, same run"
    report.row("gpu/skinny_gemm", case, took_s * 1e6, "us", least_s * 1e6, limit_is, least_s / took_s, peers)


if __name__ == "__main__":
    main()
