"""Prompt attention on Hopper at the heads of Llama-3-8B: TFLOP/s of the keys that are seen, as a share of a product's.

Sweeps tiles and names the fastest of each case, beside `extend_attention`; small steps show from which size it pays. A
case is requests x prefix + new tokens of each.

    python bench/gpu/tune_prompt_attention.py [--quick] [--json]
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from device_clock import seconds_each
from kv_states import make_states, random_queries
from prompt_runs import flops, hopper_runs, pointer_runs
from report import Report, arguments
from roofline import roofline
from warm_cache import in_processes

from diptych.kernels.gpu.attention.prompt_attention import FP8, TILE, PromptTile

BF16: Final = torch.bfloat16
LAYERS: Final = 8  # measured together
SHOWN: Final = 3
TILES: Final = (
    TILE,
    PromptTile(registers=232, copy_registers=40),
    PromptTile(keys=64, stages=2),
    PromptTile(keys=64, stages=4),
)
LARGE: Final = ((1, 0, 4096), (2, 0, 4096), (8, 0, 1024), (1, 3072, 1024), (1, 31_744, 1024), (1, 0, 32_768))
SMALL: Final = ((1, 0, 512), (1, 1024, 256), (1, 8192, 128), (4, 1024, 256), (16, 0, 64), (1, 8192, 512), (1, 0, 1024))
CASES: Final = (*((BF16, *case) for case in (*LARGE, *SMALL)), *((FP8, *case) for case in (*LARGE, (1, 8192, 512))))


def main() -> None:
    options = arguments(__doc__).parse_args()
    tiles = TILES[:1] if options.quick else TILES
    in_processes(_compile, tiles)
    limit = roofline().bf16_flops_s
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for dtype, batch_size, prefix, new in CASES:
            states, q = make_states(batch_size, prefix + new, dtype), random_queries(batch_size * new)
            ways = {"extend_attention": partial(pointer_runs, states, q, new)}
            ways |= {_name(tile): partial(hopper_runs, states, q, new, tile) for tile in tiles}
            work = flops(batch_size, prefix, new)
            speeds = {way: work / seconds_each(runs()[:LAYERS]) for way, runs in ways.items()}
            shown = sorted(speeds, key=lambda way: -speeds[way])[:SHOWN]
            for way in dict.fromkeys((*shown, _name(TILE), "extend_attention")):
                case = f"{batch_size} x {prefix} + {new} {str(dtype).removeprefix('torch.')}, {way}"
                speed = speeds[way]
                limit_is = "bf16 product, same run"
                report.row("gpu/prompt_attention", case, speed / 1e12, "TFLOP/s", limit / 1e12, limit_is, speed / limit)


def _compile(tile: PromptTile) -> None:
    """Into the cache on disk, as one after the other would take a minute."""
    for dtype in (BF16, FP8):
        states, q = make_states(1, 256, dtype), random_queries(256)
        hopper_runs(states, q, 256, tile)[0]()
    torch.cuda.synchronize()


def _name(tile: PromptTile) -> str:
    """What of a tile is swept."""
    return f"{tile.keys} keys, {tile.stages} stages, {tile.registers} registers"


if __name__ == "__main__":
    main()
