"""How well a simulation in virtual time does against the real thing: observe, fit, replay, compare.

`diptych up` serves a small model on this machine: once as a unified worker, once as a pair of prefill and decode. Of
each platform the time of steps is learned (`diptych fit`), and what a request takes beside its steps is measured by
lone requests. Then loads come as from many clients: at random times, prompts of several lengths. Each is recorded,
replayed by `diptych.simulator` with what was learned, and compared. Nothing that is compared was learned from. Each
load is served twice: how far the second time is from the first is what no simulation can be better than.

The limit of an error is the target: median 6 %, 90th percentile 12 %, and 95 % of pairs of configurations in the right
order. The machine should be idle: what else runs is in the measured times and in no model. With `--sim-timing` workers
simulate a device in real time instead, whose steps take what is said: what is left is the error of learning and of
replaying.

    python bench/fidelity.py [--quick] [--json] [--keep FOLDER] [--sim-timing step=20000,prompt=300,request=1000]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
from serve import wait_until_ready

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import ask as ask_member
from diptych.cli.requests.asking import members
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.net.ports import free_port
from diptych.engine.values.step_model import StepModel, StepShape
from diptych.kvtransfer.layout import layout_from_wire
from diptych.simulator.compare import METRICS, Comparison, Times, compare
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call
from diptych.v1.worker_pb2 import WorkerStatus

PLATFORMS: Final = {"unified": (0, 0, 1), "pair": (1, 1, 0)}  # prefill, decode, unified
SHAPES: Final = {"chat": (128, 48), "prompts": (512, 12), "outputs": (48, 96)}  # mean tokens of prompt and output
USES: Final = (0.25, 0.5, 0.75, 0.9)  # of what the platform could do, about
QUICK_S: Final = 12.0  # of each load
LONE: Final = 12  # requests by which is measured what comes to a request beside its steps
LONE_SHAPE: Final = (64, 2)
BATCH: Final = 4  # requests that share a step, about, where the rate of a load is chosen
MEDIAN_TARGET, P90_TARGET, ORDER_TARGET = 0.06, 0.12, 0.95
SIDES: Final = ("measured", "again", "simulated")
TOKENS: Final = range(32, 224)  # every vocabulary has these
ANSWER_S: Final = 10.0
SOURCE_LIMIT: Final = 1 << 20  # bytes of a line
HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: router\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Load:
    """Calls that come at random times."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A load that was served, and replayed."""

    name: str  # of the configuration
    calls: Sequence[Call]
    measured: Times
    again: Times  # the same calls, offered once more
    simulated: Times


def load(name: str, shape: tuple[int, int], rate: float, count: int, seed: int) -> Load:
    """Return calls at so many a second, whose lengths are within half and one and a half of the shape's."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate, count))
    lens = [rng.integers(mean // 2, mean + mean // 2 + 1, count) for mean in shape]
    names = rng.integers(1 << 62, size=(count, 1 + int(lens[0].max()) // BLOCK_TOKENS), dtype=np.uint64)
    calls = [
        Call(float(at_s), int(prompt), int(output), name[: -(-int(prompt) // BLOCK_TOKENS)])
        for at_s, prompt, output, name in zip(due_s, *lens, names, strict=True)
    ]
    return Load(name, tuple(calls))


def loads(model: StepModel, seconds: float, *, is_quick: bool) -> list[Load]:
    """Return loads that use a worker to the shares of `USES`, by what its steps are expected to take."""
    shapes = dict(list(SHAPES.items())[:2]) if is_quick else SHAPES
    uses = USES[1:3] if is_quick else USES
    found = []
    for seed, ((name, shape), use) in enumerate(itertools.product(shapes.items(), uses)):
        rate = use / service_s(model, *shape)
        found.append(load(f"{name} at {use:.0%}", shape, rate, max(8, int(rate * seconds)), seed))
    return found


def service_s(model: StepModel, prompt_len: int, output_len: int) -> float:
    """Return how long a worker is busy with a request whose output shares its steps with others."""
    prompt_s = model.seconds(StepShape(0, 0, prompt_len, prompt_len**2 / 2, 1))
    step_s = model.seconds(StepShape(BATCH, BATCH * (prompt_len + output_len // 2), 0, 0.0, 0))
    return prompt_s + output_len * step_s / BATCH


@dataclass(frozen=True, slots=True)
class Site:
    """How all platforms are run."""

    options: Sequence[str]  # of `diptych up`
    environment: Mapping[str, str]
    is_quick: bool
    seconds: float  # of each load
    folder: Path  # for what is learned


def site_of(options: argparse.Namespace, folder: Path) -> Site:
    flags, environment = ["--threads", str(options.threads)], dict(os.environ)
    if options.sim_timing:
        flags += ["--device", "sim", "--model", "sim"]
        environment["DIPTYCH_SIM_TIMING"] = options.sim_timing
    return Site(flags, environment, options.quick, QUICK_S if options.quick else options.seconds, folder)


@contextmanager
def platform(counts: Sequence[int], site: Site) -> Iterator[tuple[int, str]]:
    """Start `diptych up` with so many workers of each role; yield the HTTP port and the model's id."""
    port = free_port()
    sizes = [
        word
        for flag, count in zip(("prefill", "decode", "unified"), counts, strict=True)
        for word in (f"--{flag}", str(count))
    ]
    command = [sys.executable, "-m", "diptych.cli", "up", "--http-port", str(port), "--grpc-port", "0", *sizes]
    process = subprocess.Popen([*command, *site.options], stdout=subprocess.DEVNULL, env=site.environment)
    try:
        yield port, wait_until_ready(process, port)
    finally:
        process.terminate()
        process.wait(30)


def fitted(port: int, name: str, site: Site) -> StepModel:
    """Have `diptych fit` learn from the platform's workers."""
    path = site.folder / f"steps_{name}.json"
    small = ["--max-prompt", "1024", "--max-clients", "4"] if site.is_quick else ["--max-clients", "16"]
    command = [sys.executable, "-m", "diptych.cli", "fit", "--platform", str(port), "--out", str(path), *small]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, file=sys.stderr)
    return StepModel.from_json(path.read_text())


def offer(port: int, model_id: str, calls: Sequence[Call]) -> Times:
    """Send calls when they are due; return the times that clients saw."""
    rng = np.random.default_rng()  # no prompt begins as another one
    due_s = np.array([call.arrival_s for call in calls])
    stamps = np.array(asyncio.run(_offer(port, [_body(model_id, call, rng) for call in calls], due_s.tolist())))
    return Times.of(due_s, stamps[:, 0], stamps[:, 1], np.array([call.output_len for call in calls], float))


async def _offer(port: int, bodies: Sequence[bytes], due_s: Sequence[float]) -> list[tuple[float, float]]:
    clock = asyncio.get_running_loop().time
    began_s = clock()

    async def one(body: bytes, at_s: float) -> tuple[float, float]:
        await asyncio.sleep(began_s + at_s - clock())
        first_s, last_s = await _stream(port, body, clock)
        return first_s - began_s, last_s - began_s

    return list(await asyncio.gather(*map(one, bodies, due_s)))


async def _stream(port: int, body: bytes, clock: Callable[[], float]) -> tuple[float, float]:
    """Return when the first token came, and the last one; nan where the request failed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=SOURCE_LIMIT)
    writer.write(HEAD % len(body) + body)
    stamps, is_whole = [], False
    while line := await reader.readline():
        if b'"token_ids":[' in line and b'"token_ids":[]' not in line:
            stamps.append(clock())
        is_whole |= line.startswith(b"data: [DONE]")
    writer.close()
    return (stamps[0], stamps[-1]) if stamps and is_whole else (math.nan, math.nan)


def _body(model_id: str, call: Call, rng: np.random.Generator) -> bytes:
    prompt = rng.integers(TOKENS.start, TOKENS.stop, call.prompt_len).tolist()
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return json.dumps({"model": model_id, "prompt": prompt, "max_tokens": call.output_len, **fixed}).encode()


def replayed(setup: Setup, calls: Sequence[Call]) -> Times:
    """Return the times that the simulation has of the same calls."""
    outcome = simulate(setup, calls)
    return Times.of(outcome.arrival_s, outcome.first_s, outcome.last_s, outcome.output_len.astype(float))


def setup_of(port: int, model: StepModel) -> Setup:
    """Return the setup of a running platform, as its workers tell it."""
    config = located(MembersConfig(platform=str(port)))
    trust = config.trust()
    answers = [
        ask_member(each, trust, ANSWER_S) for each in members(config.bootstrap, trust) if each.role in WORKER_ROLES
    ]
    statuses = [answer.status for answer in answers if answer.status is not None]
    context_len = min(status.instance.context_len for status in statuses)
    return Setup(tuple(_worker(status, model) for status in statuses), context_len=context_len)


def _worker(status: WorkerStatus, model: StepModel) -> WorkerSetup:
    layout = layout_from_wire(status.instance.transfer.layout)
    speeds = [link.bytes_per_s for link in status.links if link.bytes_per_s]
    setup = WorkerSetup(
        role=WORKER_ROLES[status.instance.role],
        num_pages=status.instance.load.total_pages,
        page_size=layout.page_size,
        step_model=model,
        max_step_tokens=status.max_step_tokens,
        max_requests=status.max_requests,
        kv_token_bytes=layout.page_nbytes // layout.page_size,
    )
    return replace(setup, link_bytes_per_s=min(speeds)) if speeds else setup


def lone_calls() -> Sequence[Call]:
    """Return calls that meet nobody, which no load is part of."""
    lone = load("lone", LONE_SHAPE, 2.0, LONE, seed=99)
    return [replace(call, arrival_s=2.0 * i) for i, call in enumerate(lone.calls)]


def with_delays(setup: Setup, lone: Sequence[Call], found: Sequence[Times]) -> Setup:
    """Return the setup with the delay that lone requests show beside their steps. They came several times."""
    beside_s = float(np.nanmedian(np.stack([times.ttft for times in found]) - replayed(setup, lone).ttft))
    leg_s = max(0.0, setup.delays.leg_s + beside_s / 2)
    return replace(setup, delays=replace(setup.delays, leg_s=leg_s))


def observations(name: str, counts: Sequence[int], site: Site) -> Iterator[Observation]:
    """Run a platform: fit, then serve each load, between lone requests, and replay it."""
    lone, found = lone_calls(), list[Times]()
    served = list[tuple[Load, Times, Times]]()
    with platform(counts, site) as (port, model_id):
        model = fitted(port, name, site)
        setup = setup_of(port, model.with_stalls)
        found.append(offer(port, model_id, lone))
        for each in loads(model, site.seconds, is_quick=site.is_quick):
            once, again = (offer(port, model_id, each.calls) for _ in range(2))
            served.append((each, once, again))
        found.append(offer(port, model_id, lone))
    setup = with_delays(setup, lone, found)
    print(f"{name}: {2e3 * setup.delays.leg_s:.2f} ms beside the steps of a lone request", file=sys.stderr)
    for each, once, again in served:
        yield Observation(f"{name}, {each.name}", each.calls, once, again, replayed(setup, each.calls))


def records(found: Iterable[Observation]) -> Iterator[dict[str, Any]]:
    """Yield a line for each call: what it was, and its times on both sides."""
    for each in found:
        for index, call in enumerate(each.calls):
            times = {
                f"{side}_{metric}_s": round(float(getattr(getattr(each, side), metric)[index]), 6)
                for side in SIDES
                for metric in METRICS
            }
            sizes = {"arrival_s": call.arrival_s, "prompt_len": call.prompt_len, "output_len": call.output_len}
            yield {"configuration": each.name, **sizes, **times}


def print_rows(out: report.Report, found: Sequence[Observation]) -> None:
    """Print what the simulation says beside what was measured, and what a second measurement says beside the first."""
    measured = {each.name: each.measured for each in found}
    simulation = compare(measured, {each.name: each.simulated for each in found})
    for figure in simulation.figures:
        case = f"{figure.metric} {figure.quantile}, {figure.configuration}"
        out.row("fidelity", case, 1e3 * figure.simulated_s, "ms", 1e3 * figure.measured_s, "measured", 1 + figure.error)
    print_errors(out, "fidelity", simulation)
    print_errors(out, "measured again", compare(measured, {each.name: each.again for each in found}))


def print_errors(out: report.Report, bench: str, found: Comparison) -> None:
    for metric in METRICS:
        errors = found.errors(metric)
        out.row(bench, f"{metric}: median error", 100 * errors.median, "%", 100 * MEDIAN_TARGET, "target")
        out.row(bench, f"{metric}: p90 error", 100 * errors.p90, "%", 100 * P90_TARGET, "target")
        out.row(bench, f"{metric}: bias", 100 * errors.bias, "%")
        case = f"{metric}: right order, {errors.num_pairs} pairs"
        out.row(bench, case, 100 * errors.order, "%", 100 * ORDER_TARGET, "target")
    out.row(bench, "calls that were not served", found.num_unserved[1], "", found.num_unserved[0], "measured")


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--keep", type=Path, help="folder for what was learned and measured")
    parser.add_argument("--sim-timing", default="", help="workers simulate a device with this timing, in real time")
    options = parser.parse_args()
    found: list[Observation] = []
    with tempfile.TemporaryDirectory() as scratch:
        site = site_of(options, options.keep or Path(scratch))
        for name, counts in itertools.islice(PLATFORMS.items(), 1 if options.quick else None):
            found += observations(name, counts, site)
    if options.keep:
        (options.keep / "calls.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in records(found)))
    with report.Report(as_json=options.json) as out:
        print_rows(out, found)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
