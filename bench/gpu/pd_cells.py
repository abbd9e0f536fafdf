"""What two GPUs serve within an SLO, as pair, as replicas and by one adaptive policy, and what a simulation says of it.

Cells are those of `bench/slo_cells.py` in which the better choice depends on the SLO. All processes are real, requests
tell their SLO, and each platform gets the same arrivals: *1P1D* and *replicas* once a load, *adaptive* once a cell. How
long steps take is learned before (`diptych fit`) from the workers that are asked. Every request is kept. `--replay`
needs no GPU: it plays the kept arrivals in virtual time, with what was learned, and compares. Where all steps were
kept, a load is played with what the steps of the other loads say, or with those of another machine (`--learn`). What
comes to a request beside its steps is learned from others, too: from those of *1P1D* that met nobody, of other loads or
of the other machine.

    python bench/gpu/pd_cells.py --keep FOLDER [--platforms 1P1D adaptive] [--seconds 14] [--device cpu]
    python bench/gpu/pd_cells.py --replay FOLDER [--learn FOLDER]

A cell's value is the share of the requests that are served within its SLO; its limit is the better of the other two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from llama_8b import CONFIG, model_folder
from pd import CPU_OPTIONS, GPU_OPTIONS, PLATFORMS, TINY, TINY_HEADS, asked, started, wake, workload_of
from pd_load import Served, Workload
from pd_site import Front, Site
from report import Report, arguments

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model
from diptych.cli.requests.asking import members
from diptych.cli.requests.step_watch import StepWatch
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.trust.trust import INSECURE
from diptych.engine.schedule.pace import step_fit
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel, StepShape
from diptych.generation.slo import NO_SLO, Slo
from diptych.simulator.compare import METRICS, Times, compare
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call
from diptych.v1.bootstrap_pb2 import Instance

CELLS: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {  # SLOs in ms, by load
    "2000/1000@8": ((1000, 10),),
    "4000/500@7": ((300, 10), (1000, 10)),
    "8000/200@3.5": ((300, 10), (1000, 10)),
}
TINY_CELLS: Final = {"64/16@4": ((1000.0, 100.0),)}
OTHERS: Final = ("1P1D", "replicas")
AT_ONCE: Final = (("1P1D", "adaptive"), ("replicas",))  # started together: three would have too few pages each
FIT: Final = ("--max-prompt", "8192", "--max-clients", "64")
TINY_FIT: Final = ("--max-prompt", "512", "--max-clients", "4")
FIT_S: Final = 150.0
ALONE: Final = 1.02  # times the shortest time to the first token: who has no more than that met nobody
REQUESTS, LOG, STEPS = "requests.jsonl", "log.jsonl", "steps.json"  # of the folder that is kept


@dataclass(frozen=True, slots=True)
class Run:
    """A load that a platform served: of each request that counts when it was due and its times, NaN where it failed."""

    platform: str
    load: str
    slo_ms: tuple[float, float] | None  # that requests told
    prompt_len: int
    num_tokens: int
    due_s: Sequence[float]  # of all requests; those that count are the last ones
    ttft_s: Sequence[float]
    tpot_s: Sequence[float]

    @property
    def name(self) -> str:
        told = f", {self.slo_ms[0] / 1e3:g} s and {self.slo_ms[1]:g} ms" if self.slo_ms else ""
        return f"{self.platform}, {self.load}/s{told}"

    def share(self, slo_ms: tuple[float, float]) -> float:
        """Return the share of the requests that were served within an SLO."""
        met = (np.array(self.ttft_s) <= slo_ms[0] / 1e3) & (np.array(self.tpot_s) <= slo_ms[1] / 1e3)
        return float(met.mean())

    def times(self) -> Times:
        ttft, tpot = np.array(self.ttft_s), np.array(self.tpot_s)
        return Times(ttft, tpot, ttft + tpot * (self.num_tokens - 1))


def run_of(platform: str, load: str, workload: Workload, served: Sequence[Served]) -> Run:
    is_good = [not each.failure and len(each.stamps_s) > 1 for each in served]
    ttft_s = [each.ttft_s if good else float("nan") for each, good in zip(served, is_good, strict=True)]
    tpot_s = [each.tpot_s if good else float("nan") for each, good in zip(served, is_good, strict=True)]
    sizes = (workload.prompt_len, workload.num_tokens, workload.due_s())
    return Run(platform, load, workload.slo_ms, *sizes, ttft_s, tpot_s)


def measured(
    options: Namespace, config: ModelConfig, platforms: Mapping[str, Sequence[Front]]
) -> Iterator[tuple[Run, Mapping[str, Any]]]:
    """Ask the platforms one after the other. Yield with each run the steps of all workers: shapes and seconds."""
    cells = {load: CELLS[load] for load in options.loads or CELLS} if options.device == "cuda" else TINY_CELLS
    for load, slos in cells.items():
        for name, fronts in platforms.items():
            for slo_ms in slos if name not in OTHERS else (None,):
                ports = [front.http_port for front in fronts]
                workload = workload_of(load, ports, options.seconds, config)
                workload = replace(workload, slo_ms=slo_ms, prompt_seed=time.time_ns())  # nobody has its prompts cached
                with ExitStack() as stack:
                    watches = [stack.enter_context(StepWatch(each, INSECURE)) for each in _workers(fronts)]
                    run = run_of(name, load, workload, asked(workload))
                    steps = [[[*shape, took_s] for shape, took_s in watch.steps()] for watch in watches]
                yield run, {"name": run.name, "steps": steps}


def _workers(fronts: Sequence[Front]) -> list[Instance]:
    return [each for front in fronts for each in members([front.bootstrap], INSECURE) if each.role in WORKER_ROLES]


def fit(front: Front, options: Namespace) -> None:
    """Learn how long steps take, from the workers behind a router."""
    flags = FIT if options.device == "cuda" else TINY_FIT
    where = ("--bootstrap", front.bootstrap, "--router", f"http://127.0.0.1:{front.http_port}", "--insecure")
    command = [sys.executable, "-m", "diptych.cli", "fit", *where, "--out", str(options.keep / STEPS), *flags]
    subprocess.run(command, check=False, timeout=FIT_S, stdout=sys.stderr)


def measure(options: Namespace, site: Site, config: ModelConfig) -> int:
    """Keep what the platforms served. Return 1 if one did not start."""
    options.keep.mkdir(parents=True, exist_ok=True)
    code = 0
    with (options.keep / REQUESTS).open("w") as file, (options.keep / LOG).open("w") as log:
        for names in AT_ONCE:
            wanted = [name for name in names if name in options.platforms]
            if not wanted:
                continue
            with ExitStack() as stack:
                platforms = started(stack, wanted, site)
                code |= len(platforms) < len(wanted)
                for run, steps in _measured_awake(options, config, platforms):
                    print(json.dumps(asdict(run)), file=file, flush=True)
                    print(json.dumps(steps), file=log, flush=True)
    return code


def _measured_awake(
    options: Namespace, config: ModelConfig, platforms: Mapping[str, Sequence[Front]]
) -> Iterator[tuple[Run, Mapping[str, Any]]]:
    for fronts in platforms.values():
        wake([front.http_port for front in fronts], config)
    if "replicas" in platforms:  # whose steps have prompts and outputs
        fit(platforms["replicas"][0], options)
    yield from measured(options, config, platforms)


def kept_runs(folder: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in (folder / REQUESTS).read_text().splitlines()]


def simulated(run: Run, model: StepModel, beside_s: float = 0.0) -> Run:
    """Return what the simulation says of the same requests, to which so much comes beside their steps."""
    calls = [_call(run, index) for index in range(len(run.due_s))]
    turns = [calls[turn::2] for turn in range(2)] if run.platform == "replicas" else [calls]
    setup = _setup(run, model)
    setup = replace(setup, delays=replace(setup.delays, leg_s=setup.delays.leg_s + beside_s / 2))
    outcomes = [simulate(setup, turn) for turn in turns]
    columns = {
        name: np.concatenate([getattr(each, name) for each in outcomes]) for name in ("arrival_s", "ttft_s", "tpot_s")
    }
    order = np.argsort(columns["arrival_s"], kind="stable")[-len(run.ttft_s) :]
    return replace(run, ttft_s=columns["ttft_s"][order].tolist(), tpot_s=columns["tpot_s"][order].tolist())


def _call(run: Run, index: int) -> Call:
    names = np.arange(-(-run.prompt_len // BLOCK_TOKENS), dtype=np.uint64) + np.uint64((index + 1) << 20)
    return Call(run.due_s[index], run.prompt_len, run.num_tokens, names)


def _setup(run: Run, model: StepModel) -> Setup:
    worker = WorkerSetup(step_model=model, overlap=True)
    if run.platform == "replicas":
        return Setup((replace(worker, max_step_tokens=2048),), policy="round_robin")
    if run.platform == "1P1D":
        return Setup((replace(worker, role=Role.PREFILL), replace(worker, role=Role.DECODE)))
    ttft_s, tpot_s = (each / 1e3 for each in run.slo_ms) if run.slo_ms else (0.0, 0.0)
    return Setup((worker, worker), policy="adaptive", slo=Slo(ttft_s, tpot_s) if run.slo_ms else NO_SLO)


def add_cells(report: Report, side: str, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.slo_ms is None:
            continue
        slo_ms = (run.slo_ms[0], run.slo_ms[1])
        shares = {each.platform: each.share(slo_ms) for each in runs if each.load == run.load and not each.slo_ms}
        best = max(shares.values(), default=0.0)
        ratio = run.share(slo_ms) / best if best else None
        report.row(
            "gpu/pd_cells", f"{run.name}: {side}", run.share(slo_ms), "of all", best, "the better", ratio, shares
        )


def add_errors(report: Report, runs: Sequence[Run], others: Sequence[Run]) -> None:
    _add_figures(report, runs, others)
    for platform in sorted({run.platform for run in runs}):
        pairs = [(run, other) for run, other in zip(runs, others, strict=True) if run.platform == platform]
        _add_errors(report, f"{platform}, ", *zip(*pairs, strict=True))
    _add_errors(report, "", runs, others)


def _add_figures(report: Report, runs: Sequence[Run], others: Sequence[Run]) -> None:
    found = compare({run.name: run.times() for run in runs}, {run.name: run.times() for run in others})
    for figure in found.figures:
        case = f"{figure.configuration}: {figure.metric} {figure.quantile}"
        values = (1e3 * figure.simulated_s, "ms", 1e3 * figure.measured_s, "measured", 1 + figure.error)
        report.row("gpu/pd_cells", case, *values)


def _add_errors(report: Report, who: str, runs: Sequence[Run], others: Sequence[Run]) -> None:
    found = compare({run.name: run.times() for run in runs}, {run.name: run.times() for run in others})
    for metric in METRICS:
        errors = found.errors(metric)
        words = {"median": 100 * errors.median, "p90": 100 * errors.p90, "bias": 100 * errors.bias}
        report.row(
            "gpu/pd_cells", f"{who}{metric}: errors", words["median"], "%", 6, "target of the median", None, words
        )
        report.row(
            "gpu/pd_cells",
            f"{who}{metric}: right order, {errors.num_pairs} pairs",
            100 * errors.order,
            "%",
            95,
            "target",
        )


def _beside_s(runs: Sequence[Run], models: Mapping[str, StepModel]) -> float:
    """Return what comes to requests beside their steps, by those of 1P1D that nobody was before."""
    found: list[float] = []
    for run in runs:
        if run.platform == "1P1D":
            times, measured = (np.array(each.ttft_s) for each in (simulated(run, models[run.load]), run))
            found += (measured - times)[times <= ALONE * np.nanmin(times)].tolist()
    return max(0.0, float(np.nanmedian(found))) if found else 0.0


def _models(folder: Path, loads: Sequence[str]) -> Mapping[str, StepModel]:
    """Return how long steps take, for each load: as the steps of other loads say, else as `diptych fit` had it."""
    steps, log = folder / STEPS, folder / LOG
    before = StepModel.from_json(steps.read_text()) if steps.exists() else H200_LLAMA_8B
    kept = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    models = {load: (step_fit.fit(_kept_steps(kept, load)) or before).with_stalls for load in loads}
    return models


def _kept_steps(kept: Sequence[Mapping[str, Any]], but: str = "of none") -> list[tuple[StepShape, float]]:
    """Return the steps of all workers, without those of one load."""
    workers = [worker for each in kept if f", {but}/s" not in each["name"] for worker in each["steps"]]
    return [(StepShape(*shape), took_s) for worker in workers for *shape, took_s in worker]


def _learned(runs: Sequence[Run], folder: Path) -> Mapping[str, tuple[StepModel, float]]:
    """Return how long steps take and what comes beside them, for each load: as other loads say."""
    models = _models(folder, sorted({run.load for run in runs}))
    return {
        load: (model, _beside_s([run for run in runs if run.load != load], models)) for load, model in models.items()
    }


def _learned_elsewhere(runs: Sequence[Run], folder: Path) -> Mapping[str, tuple[StepModel, float]]:
    """Return the same as all loads of another folder say, which no run is of."""
    kept = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    model, loads = (step_fit.fit(_kept_steps(kept)) or H200_LLAMA_8B).with_stalls, {run.load for run in runs}
    there = kept_runs(folder)
    beside_s = _beside_s(there, {run.load: model for run in there})
    return {load: (model, beside_s) for load in loads}


def replay(folder: Path, elsewhere: Path | None, as_json: bool) -> None:
    runs = kept_runs(folder)
    learned = _learned(runs, folder) if elsewhere is None else _learned_elsewhere(runs, elsewhere)
    for load, (model, beside_s) in learned.items():
        terms = [round(1e6 * term, 4) for term in model.terms]
        print(f"for {load}/s, in us: {terms}, and {1e3 * beside_s:.1f} ms beside steps", file=sys.stderr)
    others = [simulated(run, *learned[run.load]) for run in runs]
    with Report(as_json=as_json) as report:
        add_cells(report, "measured", runs)
        add_cells(report, "simulated", others)
        add_errors(report, runs, others)


def arguments_of() -> Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=[*OTHERS, "adaptive"])
    parser.add_argument("--loads", nargs="+", choices=CELLS, help="of those with cells; all without")
    parser.add_argument("--seconds", type=float, default=14.0, help="in which requests count")
    parser.add_argument("--keep", type=Path, help="folder for what is learned and measured")
    parser.add_argument("--replay", type=Path, help="folder that was kept")
    parser.add_argument("--learn", type=Path, help="folder that was kept elsewhere, to learn steps from")
    options = parser.parse_args()
    if (options.keep is None) == (options.replay is None):
        parser.error("say either --keep FOLDER, to measure, or --replay FOLDER")
    return options


def main() -> int:
    options = arguments_of()
    if options.replay:
        replay(options.replay, options.learn, options.json)
        return 0
    on_gpus = options.device == "cuda"
    with model_folder(CONFIG if on_gpus else {**CONFIG, **TINY, **TINY_HEADS}) as folder:
        flags: Mapping[str, Any] = GPU_OPTIONS if on_gpus else CPU_OPTIONS
        site = Site(str(folder), flags, with_gpus=on_gpus)
        code = measure(options, site, open_model(str(folder), "dummy").config)
    replay(options.keep, None, options.json)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
