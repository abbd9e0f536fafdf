"""Simulate a platform that is offered a load: `diptych simulate --trace chat --rate 8 --workers prefill=2,decode=2`."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from diptych.cli.plans.simulation import (
    ALL,
    WatchedPlanner,
    kills_of,
    platform_words,
    policies_of,
    remarks,
    trace_words,
    workers_of,
)
from diptych.common.config import option, to_flags
from diptych.common.errors import ConfigError
from diptych.engine.values.limits import PIN_SHARE
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel
from diptych.generation.slo import Slo
from diptych.planner.values import Limits
from diptych.router.choose.policies import POLICIES
from diptych.router.values.slo_tiers import Tiers, tiers_of
from diptych.simulator.fluid import fluid
from diptych.simulator.hindsight import Hindsight, hindsight
from diptych.simulator.outcome import Outcome
from diptych.simulator.report.errors import errors, typical
from diptych.simulator.report.oracle import oracle_fields, oracle_words
from diptych.simulator.report.plot import plot
from diptych.simulator.report.summary import of_tiers, summary
from diptych.simulator.report.table import Result, as_json, error_table, table
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import Call, digest_of
from diptych.simulator.traces.closed_loop import closed_loop
from diptych.simulator.traces.generators.named import GENERATORS, generate
from diptych.simulator.traces.measured import Measured
from diptych.simulator.traces.mooncake import write
from diptych.simulator.traces.reading import at_rate, measured_in, read_calls

CONTEXT_LEN: Final = 131_072  # that the built-in model takes
H200: Final = "h200"
GENERATED_CALLS: Final = 1000
GENERATED_RATE: Final = 4.0


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """Simulate a platform in virtual time: the product's own schedulers and routing on a clock that costs nothing.

    How long a step takes is a model, measured on a worker; the same options give the same decisions everywhere.
    """

    trace: str = option("chat", help=f"file of calls, or what to generate: {', '.join(GENERATORS)}", group="load")
    calls: int = option(0, help=f"calls to generate, or to read; 0: {GENERATED_CALLS}, or all of a file", group="load")
    rate: float = option(0.0, help=f"calls a second; 0: {GENERATED_RATE:g}, or as the file has them", group="load")
    seed: int = option(0, help="of the generated trace, and of all that the platform draws", group="load")
    save_trace: Path | None = option(None, help="write the calls to this file, to be read again", group="load")
    workers: tuple[str, ...] = option(
        ("prefill=2", "decode=2"), help="how many of which role: prefill=2,decode=2,unified=4", group="platform"
    )
    closed_loop: bool = option(
        False, help="each call of a session comes when the one before it is answered, and calls a tool", group="load"
    )
    step_model: str = option(H200, help=f"file of `diptych fit`, or {H200}: Llama-3-8B on an H200", group="platform")
    policy: tuple[str, ...] = option(
        ("pair_cost",), help="routing policies, which are compared; all: every one", group="platform"
    )
    kv_tokens: int = option(800_000, help="tokens that a worker's KV pool holds", group="platform")
    page_size: int = option(16, help="tokens a KV page", group="platform")
    pin_share: float = option(
        PIN_SHARE, help="of a KV pool, for sessions that have called a tool; 0: none", group="platform"
    )
    kv_token_bytes: int = option(131_072, help="KV of one token", group="platform")
    link_gb_per_s: float = option(300.0, help="that a worker moves KV at, 10^9 bytes a second", group="platform")
    max_step_tokens: int = option(8192, help="tokens of prompts that a step computes", group="platform")
    max_requests: int = option(256, help="requests that a worker runs at once", group="platform")
    mixed_step_ms: float = option(100.0, help="longest step that has prompts beside running requests", group="platform")
    overlap: bool = option(
        False, help="steps are planned while others run, as on GPUs: a first token is a step later", group="platform"
    )
    tp: int = option(
        1, help="GPUs of a worker, for GPU-hours; the step model is that of all together", group="platform"
    )
    planner: bool = option(
        False, help="have the planner decide how many workers there are, from these on", group="events"
    )
    gpus: int = option(0, help="that the planner may use; 0: those that --workers have", group="events")
    start_s: float = option(60.0, help="that a worker takes to start which the planner asks for", group="events")
    kill: tuple[str, ...] = option(
        (),
        help="workers that die, T:WORKER: after so many seconds, numbered from 1 on",
        group="events",
    )
    ttft_slo_ms: float = option(
        0.0, help="a call is served well with its first token within so long; 0: not said", group="slo"
    )
    tpot_slo_ms: float = option(
        0.0, help="and with each token after it within so long, in the mean; 0: not said", group="slo"
    )
    slo_tiers: tuple[str, ...] = option(
        (), help="SLOs that calls may name: NAME:ttft_ms=300:tpot_ms=40:weight=2:sheddable", group="slo"
    )
    hindsight: bool = option(
        False, help="search for the best fixed platform and the best that changes, knowing the load", group="results"
    )
    compare: bool = option(
        False, help="say how far it is from what the log says: the trace is a request log", group="results"
    )
    json: Path | None = option(None, help="write all results to this file, for programs", group="results")
    plot: Path | None = option(None, help="draw latencies and load to this file, as SVG", group="results")

    @property
    def tiers(self) -> Tiers:
        """Raises `ConfigError`."""
        return tiers_of(self.slo_tiers, Slo(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000))

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        for name in (
            "kv_tokens",
            "page_size",
            "kv_token_bytes",
            "link_gb_per_s",
            "max_step_tokens",
            "max_requests",
            "tp",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        for name in ("calls", "rate", "seed", "mixed_step_ms", "gpus", "start_s", "ttft_slo_ms", "tpot_slo_ms"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, as {getattr(self, name)} is")
        if not 0 <= self.pin_share <= 1:
            raise ConfigError(f"--pin-share must be from 0 to 1, not {self.pin_share}")
        if self.compare and (self.calls or self.rate):
            raise ConfigError("--compare takes a whole log at its own rate: leave --calls and --rate out")
        if self.hindsight and self.kill:
            raise ConfigError("--hindsight searches among platforms of which nobody dies: leave --kill out")
        policies_of(self.policy)
        kills_of(self.kill, len(workers_of(self.workers, WorkerSetup())))
        if self.gpus and not self.planner:
            raise ConfigError("--gpus is what the planner may use: give --planner too")
        self.tiers  # noqa: B018  # raises


class Run(NamedTuple):
    """What came of one policy."""

    outcome: Outcome
    result: Result


def main(config: SimulateConfig) -> int:
    """Simulate each policy and print what came of it; return the exit code."""
    calls = calls_of(config)
    measured = measured_of(config) if config.compare else None
    if config.save_trace is not None:
        _write(config.save_trace, "".join(write(calls)))
    workers = workers_of(config.workers, worker_of(config))
    print(f"load       {config.trace}: {trace_words(calls)}\nplatform   {platform_words(workers)}", flush=True)
    for remark in remarks(calls, config.tiers.slos):
        print(f"note       {remark}")
    runs = {policy: _run(config, policy, workers, calls) for policy in policies_of(config.policy)}
    print(f"\n{table({policy: run.result for policy, run in runs.items()})}\n")
    bound = fluid(calls, _slos(config, calls), worker_of(config), most_workers(config, workers))
    searched = _searched(config, workers, calls) if config.hindsight else None
    for line in oracle_words({name: run.result.whole for name, run in runs.items()}, bound, searched):
        print(line)
    if others := [each for each in POLICIES if each not in runs]:
        print(f"policies   {', '.join(runs)}; --policy {ALL} has them beside {', '.join(others)}")
    print(f"again      {command_of(config)}")
    _save(config, calls, runs, oracle_fields(bound, searched))
    if measured is not None:
        for policy, (outcome, _) in runs.items():
            print(f"\ncompared   {policy}\n{error_table(errors(outcome, measured), typical(outcome, measured))}")
    return 0


def calls_of(config: SimulateConfig) -> Sequence[Call]:
    """Return the calls of a file, or new ones. Raises `ConfigError`."""
    calls = _offered(config)
    return closed_loop(calls) if config.closed_loop else calls


def _offered(config: SimulateConfig) -> Sequence[Call]:
    if config.trace in GENERATORS:
        return generate(config.trace, config.calls or GENERATED_CALLS, config.rate or GENERATED_RATE, config.seed)
    try:
        calls = read_calls(_lines(config))[: config.calls or None]
        return at_rate(calls, config.rate) if config.rate else calls
    except ConfigError as error:
        raise ConfigError(f"--trace: {config.trace}: {error}") from None


def measured_of(config: SimulateConfig) -> Measured:
    """Return how the calls of the trace were served. Raises `ConfigError` unless it is a request log."""
    return measured_in([] if config.trace in GENERATORS else _lines(config))


def worker_of(config: SimulateConfig) -> WorkerSetup:
    """Return what all workers have alike. Raises `ConfigError` if the step model can't be read."""
    return WorkerSetup(
        num_pages=config.kv_tokens // config.page_size,
        page_size=config.page_size,
        step_model=_step_model(config.step_model),
        max_step_tokens=config.max_step_tokens,
        max_requests=config.max_requests,
        mixed_step_s=config.mixed_step_ms / 1000 or math.inf,
        kv_token_bytes=config.kv_token_bytes,
        link_bytes_per_s=config.link_gb_per_s * 1e9,
        num_gpus=config.tp,
        overlap=config.overlap,
        pin_share=config.pin_share,
    )


def setup_of(config: SimulateConfig, policy: str, workers: Sequence[WorkerSetup], calls: Sequence[Call]) -> Setup:
    """Return the platform that serves calls, however long they are, by one policy."""
    longest = max(call.prompt_len + call.output_len for call in calls)
    slos = config.tiers.slos
    return Setup(
        workers=tuple(workers),
        policy=policy,
        seed=config.seed,
        slo=slos["default"],
        tiers=slos,
        context_len=max(CONTEXT_LEN, longest),
        actions=kills_of(config.kill, len(workers)),
        more=replace(worker_of(config), start_s=config.start_s),
        bounds=Limits(budget_gpus=config.gpus or len(workers) * config.tp),
    )


def command_of(config: SimulateConfig) -> str:
    """Return the command line that gives the same decisions again; it writes no files."""
    usual = {*to_flags(SimulateConfig())}
    files = ("--json=", "--plot=", "--save-trace=")
    return shlex.join(
        ["diptych", "simulate", *(f for f in to_flags(config) if f not in usual and not f.startswith(files))]
    )


def _lines(config: SimulateConfig) -> Sequence[str]:
    try:
        return Path(config.trace).expanduser().read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise ConfigError(f"there is no such file, and what can be generated is {', '.join(GENERATORS)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it can't be read: {error}") from None


def _run(config: SimulateConfig, policy: str, workers: Sequence[WorkerSetup], calls: Sequence[Call]) -> Run:
    setup = setup_of(config, policy, workers, calls)
    begun_s = time.monotonic()
    planner = WatchedPlanner() if config.planner else None
    outcome = simulate(setup, calls, planner)
    took_s = max(time.monotonic() - begun_s, 1e-9)
    print(f"{policy}: {outcome.virtual_s:.0f} s in {took_s:.1f} s, x{outcome.virtual_s / took_s:.0f}", file=sys.stderr)
    if planner is not None:
        print(f"planner    {policy}: {planner.words}")
    slos, tiers = _slos(config, calls), [call.tier for call in calls]
    by_tier = of_tiers(outcome, slos, tiers) if len({*tiers}) > 1 else {}
    return Run(outcome, Result(summary(outcome, setup.slo, slos), by_tier))


def _step_model(name: str) -> StepModel:
    if name == H200:
        return H200_LLAMA_8B
    try:
        return StepModel.from_json(Path(name).expanduser().read_text(encoding="utf-8")).with_stalls
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--step-model: {name} can't be read ({error}); give {H200}, or a file of `diptych fit`"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"--step-model: {name}: {error}") from None


def most_workers(config: SimulateConfig, workers: Sequence[WorkerSetup]) -> int:
    """Return how many workers there may be at once."""
    return max(len(workers), config.gpus // config.tp)


def _slos(config: SimulateConfig, calls: Sequence[Call]) -> Sequence[Slo]:
    slos = config.tiers.slos
    return [slos.get(call.tier, slos["default"]) for call in calls]


def _searched(config: SimulateConfig, workers: Sequence[WorkerSetup], calls: Sequence[Call]) -> Hindsight:
    policies, slos = policies_of(config.policy), _slos(config, calls)
    setup, most = setup_of(config, policies[0], workers, calls), most_workers(config, workers)
    return hindsight(setup, calls, policies, lambda outcome: summary(outcome, setup.slo, slos).good, most)


def _save(config: SimulateConfig, calls: Sequence[Call], runs: Mapping[str, Run], oracle: Mapping[str, Any]) -> None:
    if config.plot is not None:
        title = f"{config.trace}, {','.join(config.workers)}"
        _write(config.plot, plot({policy: run.outcome for policy, run in runs.items()}, title))
    if config.json is not None:
        found: dict[str, Any] = {
            "command": command_of(config),
            "version": version("diptych"),
            "trace": {"calls": len(calls), "digest": digest_of(calls)},
            "policies": as_json({policy: run.result for policy, run in runs.items()}),
            **oracle,
        }
        _write(config.json, json.dumps(found, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; give another file") from None
