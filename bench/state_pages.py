"""What it takes to copy the state of a request between its slot and pages, unit by unit: beside a copy as it lies.

Shapes as published, layers in bfloat16, one state, one thread. ms of the best round; the two take turns.

    python bench/state_pages.py [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import torch
from report import Report, arguments

from diptych.architectures.recurrent import DeltaNet, KimiDelta, Mamba2, Mixer, Recurrent, ShortConv
from diptych.engine.runner.states import Units
from diptych.engine.values.kv_regions import share_nbytes, state_nbytes

NUM_SLOTS: Final = 4
SHAPES: Final[dict[str, tuple[int, Mixer]]] = {  # recurrent layers, and how they mix
    "Qwen3-Next 80B": (36, DeltaNet(16, 32, 128, 128, 4)),
    "Kimi Linear 48B": (20, KimiDelta(32, 128, 4)),
    "Nemotron 3 Nano": (23, Mamba2(64, 64, 8, 128, 4, 0.0)),
    "LFM2 1.2B": (10, ShortConv(2048, 3)),
}


def main() -> int:
    torch.set_num_threads(1)
    options = arguments(__doc__).parse_args()
    with Report(as_json=options.json) as report:
        for name, (num_layers, mixer) in SHAPES.items():
            measure(report, name, Recurrent(tuple(range(num_layers)), mixer), 5 if options.quick else 40)
    return 0


def measure(report: Report, name: str, recurrent: Recurrent, rounds: int) -> None:
    slots = torch.zeros(NUM_SLOTS, state_nbytes(recurrent, "bfloat16"), dtype=torch.uint8)
    units, nbytes = Units(slots, recurrent, "bfloat16"), share_nbytes(recurrent, "bfloat16")
    one = torch.tensor([1])
    pages, plain = units.take(one, nbytes), slots[one].clone()
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "to pages": (lambda: units.take(one, nbytes), lambda: slots[one]),
        "from pages": (lambda: units.put(one, pages), lambda: slots.__setitem__(one, plain)),
    }
    for way, copies in ways.items():
        best = [float("inf")] * 2
        for _ in range(rounds):
            best = [min(known, timed(copy)) for known, copy in zip(best, copies, strict=True)]
        taken, limit = (1e3 * each for each in best)
        case = f"{name}, {nbytes / 2**20:.1f} MiB {way}"
        report.row("state_pages", case, taken, "ms", limit, "ms, as it lies", limit / taken)


def timed(copy: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    copy()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
