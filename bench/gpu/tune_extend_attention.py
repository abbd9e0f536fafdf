"""Extend attention at the heads of Llama-3-8B: TFLOP/s of the keys that are seen, as a share of a matrix product's.

Sweeps tiles and names the fastest of each case, within a minute; `--quick` measures only those that `choose_tile`
chooses. A case is requests x prefix + new tokens of each.

    python bench/gpu/tune_extend_attention.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from device_clock import seconds_each
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, make_states, random_queries
from report import Report, arguments
from roofline import roofline
from triton.runtime.errors import OutOfResources
from warm_cache import in_processes

from diptych.kernels.gpu.attention.extend_attention import Tile, choose_tile, extend_attention

GROUP: Final = NUM_HEADS // NUM_KV_HEADS
SHOWN: Final = 3
LAYERS: Final = 4  # measured together
MANY_LAYERS_TOKENS: Final = 8192  # a larger pool has fewer layers, so a stride of its own, which is compiled for
TILES: Final = (
    *(Tile(128, keys, 8, num_stages) for keys, num_stages in ((32, 4), (64, 2), (64, 3), (64, 4), (128, 3))),
    *(Tile(128, keys, 4, num_stages) for keys, num_stages in ((32, 3), (64, 3))),
    *(Tile(64, keys, 4, num_stages) for keys, num_stages in ((64, 2), (64, 3), (128, 2))),
    Tile(16, 64, 4, 3),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal length."""

    batch_size: int
    prefix_len: int
    extend_len: int
    kv_dtype: torch.dtype = torch.bfloat16
    window: int = 0

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        name = str(self.kv_dtype).removeprefix("torch.")
        return f"{self.batch_size} x {self.prefix_len} + {self.extend_len} {name}{window}"

    @property
    def num_tokens(self) -> int:
        return self.batch_size * (self.prefix_len + self.extend_len)

    @property
    def flops(self) -> int:
        """Two products of each query with the keys that it sees."""
        seen = range(self.prefix_len + 1, self.prefix_len + self.extend_len + 1)
        keys = sum(min(count, self.window or count) for count in seen)
        return 4 * self.batch_size * keys * NUM_HEADS * HEAD_DIM

    @property
    def chosen(self) -> Tile:
        rows = self.extend_len * GROUP
        return choose_tile(self.batch_size * rows, rows, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16)


FP8: Final = torch.float8_e4m3fn
CASES: Final = (
    Case(1, 0, 512),
    Case(16, 0, 512),
    Case(1, 0, 4096),
    Case(1, 28_672, 4096),
    Case(4, 8192, 4),
    Case(1, 0, 4096, FP8),
    Case(1, 0, 16_384, window=4096),
)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limit = roofline().bf16_flops_s
    if not options.quick:
        kinds = {(case.kv_dtype, case.window, case.num_tokens > MANY_LAYERS_TOKENS): case for case in CASES}
        in_processes(_compile, ((case, tile) for case in kinds.values() for tile in TILES))
    with Report(as_json=options.json) as report:
        for case in CASES:
            tiles = {case.chosen} if options.quick else {*TILES, case.chosen}
            speeds = _speeds(case, tiles)
            for tile in sorted(speeds, key=lambda tile: -speeds[tile])[:SHOWN]:
                _row(report, f"{case}, {_name(tile)}", speeds[tile], limit)
            _row(report, f"{case}, {_name(case.chosen)}, chosen", speeds[case.chosen], limit)


def _compile(what: tuple[Case, Tile]) -> None:
    """Into the cache on disk, as one after the other would take minutes."""
    case, tile = what
    try:
        _runs(case)[0](tile=tile)
    except OutOfResources:
        return


def _speeds(case: Case, tiles: set[Tile]) -> dict[Tile, float]:
    """Return flop/s of each tile that fits."""
    runs, speeds = _runs(case), {}
    for tile in tiles:
        try:
            speeds[tile] = case.flops / seconds_each([partial(run, tile=tile) for run in runs])
        except OutOfResources:
            continue
    return speeds


def _runs(case: Case) -> list[Callable[..., None]]:
    """One a layer."""
    states = make_states(case.batch_size, case.prefix_len + case.extend_len, case.kv_dtype)
    q = random_queries(case.batch_size * case.extend_len)
    starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device="cuda") * case.extend_len
    common: dict[str, Any] = {"max_extend_len": case.extend_len, "scale": SCALE, "window": case.window}
    return [
        partial(extend_attention, q, layer, states.page_table, states.seq_lens, starts, torch.empty_like(q), **common)
        for layer in states.layers[:LAYERS]
    ]


def _name(tile: Tile) -> str:
    """Rows x keys, stages, warps."""
    return f"{tile.rows}x{tile.keys} s{tile.num_stages} w{tile.num_warps}"


def _row(report: Report, case: str, speed: float, limit: float) -> None:
    limit_is = "bf16 product, same run"
    report.row("gpu/extend_attention", case, speed / 1e12, "TFLOP/s", limit / 1e12, limit_is, speed / limit)


if __name__ == "__main__":
    main()
