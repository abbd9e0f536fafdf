"""A whole decode step of Llama-3-8B, made-up weights in bfloat16, against one read of weights and KV at copy speed.

Through the runner that workers use, queued as an overlapping scheduler queues: with graphs and without, and one step
after the other. Then under a worker's own scheduler, which receives, plans, commits and answers beside the GPU's work.
*Idle*: the share of a step in which the GPU had nothing to do, by marks on its stream (`step_marks.py`).

    python bench/gpu/decode_step.py [--parts runner engine fp8] [--weights fp8|int4] [--quick] [--json]
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from typing import Final

import torch
from engine_steps import engine_pace
from forward_batches import PAGE_SIZE, decode_batch
from llama_8b import DECODE_CASES, decode_limit_s, model_folder
from model_steps import WEIGHTS, load, one_by_one, overlapped, runner_of
from report import Report, arguments
from roofline import Roofline, roofline
from step_marks import Pace

from diptych.checkpoints.source import open_model
from diptych.engine.runner.loaded_model import LoadedModel

WANTED_MS: Final = {
    ("bfloat16", "bfloat16"): {(1, 1024): 4.6, (64, 4096): 13.6},
    ("bfloat16", "fp8"): {(1, 1024): 2.9},
    ("bfloat16", "int4"): {(1, 1024): 2.2},
}  # by what KV and weights are kept in
WEIGHT_NBYTES: Final = {"bfloat16": 2, "fp8": 1, "int4": 4.25 / 8}  # of layers: a scale of four bytes for 128 in INT4
WANTED_IDLE: Final = 0.03  # of a step
NUM_STEPS: Final = 60
PAGES_TO_GROW: Final = 12  # of each request, beyond its context
NUM_PAGES: Final = 1 + max(size * (context // PAGE_SIZE + PAGES_TO_GROW) for size, context in DECODE_CASES)
KV_DTYPES: Final = {"runner": "bfloat16", "engine": "bfloat16", "fp8": "fp8_e4m3"}  # by part
Cases = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A model, and in what it is kept."""

    model: LoadedModel
    kv_dtype: str
    weights: str  # see `WEIGHTS`

    def limit_s(self, limits: Roofline, case: tuple[int, int]) -> float:
        kv_nbytes = 1 if self.kv_dtype == "fp8_e4m3" else 2
        return decode_limit_s(limits, self.model.config, *case, kv_nbytes, WEIGHT_NBYTES[self.weights])

    @property
    def kept(self) -> str:
        return f"KV {self.kv_dtype}" + ("" if self.weights == "bfloat16" else f", weights {self.weights.upper()}")


def name_of(case: tuple[int, int]) -> str:
    return f"B {case[0]}, L {case[1]}"


def measure_runner(report: Report, limits: Roofline, measured: Measured, cases: Cases) -> None:
    with_graphs, without = (runner_of(measured.model, with_graphs=each) for each in (True, False))
    for case in cases:
        batch = decode_batch(*case, NUM_PAGES)
        pace = overlapped(with_graphs, batch, NUM_STEPS)
        peers = {"one by one": 1e3 * one_by_one(with_graphs, batch, NUM_STEPS)}
        peers["without graphs"] = 1e3 * overlapped(without, batch, NUM_STEPS).step_s
        wanted = WANTED_MS.get((measured.kv_dtype, measured.weights), {})
        peers |= {"wanted": wanted[case]} if case in wanted else {}
        add_to_report(report, f"step, {measured.kept}", case, pace, measured.limit_s(limits, case), peers)


def measure_engine(report: Report, limits: Roofline, measured: Measured, cases: Cases) -> None:
    runner = runner_of(measured.model, with_graphs=True)
    for case in cases:
        pace = engine_pace(runner, NUM_PAGES, *case, NUM_STEPS)
        limit_s = measured.limit_s(limits, case)
        add_to_report(report, f"step under the scheduler, {measured.kept}", case, pace, limit_s, {})


def add_to_report(
    report: Report, what: str, case: tuple[int, int], pace: Pace, limit_s: float, peers: dict[str, float]
) -> None:
    name = f"{what}, {name_of(case)}"
    ms, limit_ms = 1e3 * pace.step_s, 1e3 * limit_s
    report.row("gpu/decode", name, ms, "ms", limit_ms, "bytes at copy speed", limit_ms / ms, peers)
    idle, late = max(pace.idle, 1e-6), {"queued late": 100 * pace.late}
    report.row("gpu/decode", f"  {name}: idle", 100 * idle, "%", 100 * WANTED_IDLE, "wanted", WANTED_IDLE / idle, late)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(KV_DTYPES), default=list(KV_DTYPES))
    parser.add_argument("--weights", choices=list(WEIGHTS), default="bfloat16", help="of the layers")
    options = parser.parse_args()
    limits = roofline()
    cases = (DECODE_CASES[0], DECODE_CASES[-1]) if options.quick else DECODE_CASES
    measures = {"runner": measure_runner, "engine": measure_engine, "fp8": measure_runner}
    chosen = [part for part in KV_DTYPES if part in options.parts]
    with model_folder() as folder, Report(as_json=options.json) as report:
        source = open_model(str(folder), "dummy")
        for kv_dtype, parts in itertools.groupby(chosen, KV_DTYPES.__getitem__):
            measured = Measured(load(source, NUM_PAGES, kv_dtype, options.weights), kv_dtype, options.weights)
            for part in parts:
                measures[part](report, limits, measured, cases)
            del measured
            free_memory()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
