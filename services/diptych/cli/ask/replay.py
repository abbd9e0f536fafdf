"""Ask a server again what a request log says was asked: `diptych replay requests.jsonl --to http://host:8000`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.cli.load.asked import asked_of, fitting, within
from diptych.cli.load.client import Server
from diptych.cli.load.sending import Target, context_of, send_all, served_model
from diptych.cli.load.served import Served, Times, as_json, result_of, table, times_of
from diptych.cli.measure.bench_serve import DEFAULT_URL, write
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.generation.slo import Slo
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.measured import Measured
from diptych.simulator.traces.mooncake import write as trace_of
from diptych.simulator.traces.reading import measured_in, read_calls

KEPT: Final = ("arrival_s", "prompt_len", "output_len", "blocks", "session")  # of a call, when a log is redacted


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Ask a server again what a router's request log says was asked, and compare how it was served.

    A log has no text: prompts are words, as long as those were, and equal where those were equal. With --redact nothing
    is asked: a trace is written that has neither tenants nor tiers, nor any hash of a prompt, to be given to others.
    """

    log: Path = argument(REQUIRED, help="a router's --request-log, or a trace")
    to: str = option("", help=f"address of the server; none: {DEFAULT_URL}")
    api_key: str = option("", help="key, where the server wants one; better by the variable")
    model: str = option("", help="model; none: the first that the server names")
    speed: float = option(1.0, help="times as fast as it was; 2: twice the load")
    calls: int = option(0, help="the first calls only; 0: all")
    concurrency: int = option(0, help="calls at once at most; 0: no bound")
    ttft_slo_ms: float = option(0.0, help="a call is served well with its first token within so long", group="slo")
    tpot_slo_ms: float = option(0.0, help="and with each token after it within so long, in the mean", group="slo")
    redact: Path | None = option(None, help="write the trace to this file, and ask nobody")
    json: Path | None = option(None, help="write all results, and those of each call, to this file")

    def validate(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"--speed must be positive, not {self.speed:g}")
        for name in ("calls", "concurrency", "ttft_slo_ms", "tpot_slo_ms"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative")


def main(config: ReplayConfig) -> int:
    """Replay; return 0 if every call was served."""
    lines = _lines(config.log)
    calls = _calls(config, lines)
    if config.redact is not None:
        write(config.redact, "".join(f"{line}\n" for line in trace_of(redacted(calls))))
        print(f"{len(calls)} calls are in {config.redact}: times, lengths, sessions, and which prompts begin alike")
        return 0
    slo = Slo(config.ttft_slo_ms / 1000, config.tpot_slo_ms / 1000)
    kept, served = asyncio.run(_replayed(config, calls))
    result = result_of(served, slo)
    print(table(result, slo))
    if '"log"' in lines[0]:
        print(compared(measured_in(lines), kept, served))
    if config.json is not None:
        write(config.json, json.dumps(as_json(result, served), indent=2) + "\n")
    return 0 if result.served == result.offered else 1


async def _replayed(config: ReplayConfig, calls: Sequence[Call]) -> tuple[Sequence[int], Sequence[Served]]:
    """Return which calls were sent, by number, and how they were served: those that the context has room for."""
    server, load = Server(config.to or DEFAULT_URL, config.api_key), asked_of(calls)
    model, context_len = (
        (config.model, await context_of(server, config.model)) if config.model else await served_model(server)
    )
    kept: Sequence[int] = range(len(load))
    if context_len:
        kept, load = fitting(load, context_len), within(load, context_len)
    if not load:
        raise ConfigError(f"no call of {config.log} has room in the context of {model}, {context_len} tokens")
    target = Target(server, model, extra={"ignore_eos": True})
    print(f"{len(load)} of {len(calls)} calls, {config.speed:g} times as fast, to {target.model} at {server.root}")
    return kept, await send_all(target, load, config.concurrency)


def _calls(config: ReplayConfig, lines: Sequence[str]) -> Sequence[Call]:
    try:
        calls = read_calls(lines)[: config.calls or None]
    except ConfigError as error:
        raise ConfigError(f"{config.log}: {error}") from None
    return [replace(call, arrival_s=call.arrival_s / config.speed) for call in calls]


def redacted(calls: Sequence[Call]) -> Sequence[Call]:
    """Return calls without what names a tenant or an objective; sessions and blocks are numbered already."""
    return [Call(**{name: getattr(call, name) for name in KEPT}) for call in calls]


def compared(was: Measured, kept: Sequence[int], served: Sequence[Served]) -> str:
    """Return how the calls that were sent (`kept`, by number) were served when they were logged, beside now."""
    now = {"TTFT": times_of(call.ttft_s for call in served), "TPOT": times_of(call.tpot_s for call in served)}
    then = {"TTFT": _times(was.ttft_s[list(kept)]), "TPOT": _times(was.tpot_s[list(kept)])}
    lines = ["", f"{'ms':<9}{'logged p50':>12}{'now':>10}{'logged p90':>12}{'now':>10}{'logged p99':>12}{'now':>10}"]
    for name, logged in then.items():
        pairs = zip(logged[1:], now[name][1:], strict=True)
        lines.append(f"{name:<9}" + "".join(f"{1000 * one:>12.1f}{1000 * two:>10.1f}" for one, two in pairs))
    return "\n".join(lines)


def _times(values: Any) -> Times:
    return times_of(value for value in np.asarray(values, float).tolist())


def _lines(path: Path) -> Sequence[str]:
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not lines:
        raise ConfigError(f"{path} is empty: nobody has asked for anything yet")
    return lines
