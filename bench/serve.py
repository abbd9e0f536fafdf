"""The whole platform against the embedded engine: what disaggregation and its four processes cost and bring.

`diptych up` with one prefill and one decode worker, and the embedded engine, run the same model with the same number of
threads a process, one after the other, on the same prompts. The limit of a latency is the embedded engine's.

    python bench/serve.py [--quick] [--json] [--threads N]
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import report

from diptych.common.net.ports import free_port
from diptych.engine import Engine, EngineOptions, SamplingParams

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One request as its client saw it."""

    ttft_s: float
    gaps_s: tuple[float, ...]  # between events that carry text
    num_tokens: int
    timings: dict[str, Any]  # the platform's own account; empty for the embedded engine


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids, so that no prefix is shared and nothing is cached."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 40_000, length).tolist() for _ in range(count)]


def run_embedded(engine: Engine, prompt: list[int], num_tokens: int) -> Run:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    stamps, tokens = [], 0
    for delta in engine.stream(prompt, params):
        stamps.append(time.perf_counter())
        tokens += len(delta.token_ids)
    gaps = tuple(b - a for a, b in itertools.pairwise(stamps))
    return Run(stamps[0] - began, gaps, tokens, {})


def run_platform(port: int, model: str, prompt: list[int], num_tokens: int) -> Run:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json", "x-diptych-timings": "1"}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    stamps: list[float] = []
    tokens, timings = 0, dict[str, Any]()
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        if event["choices"] and event["choices"][0].get("finish_reason") is None:
            stamps.append(time.perf_counter())
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        timings = event.get("diptych") or timings
    connection.close()
    gaps = tuple(b - a for a, b in itertools.pairwise(stamps))
    assert timings["whole"], timings
    return Run(stamps[0] - began, gaps, tokens, timings)


@contextmanager
def platform(num_threads: int) -> Iterator[tuple[int, str]]:
    """Start `diptych up`; yield the HTTP port and the model's id."""
    with platform_with(("--threads", str(num_threads))) as started:
        yield started


@contextmanager
def platform_with(options: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The same, with any options of that command."""
    port = free_port()
    command = [sys.executable, "-m", "diptych.cli", "up", "--http-port", str(port), "--grpc-port", "0"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        yield port, wait_until_ready(process, port)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while get(port, "/ready")[0] != 200:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the platform did not start: try `diptych up` to see why")
        time.sleep(0.1)
    return str(get(port, "/v1/models")[1]["data"][0]["id"])


def get(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    except OSError:
        return 0, None
    finally:
        connection.close()


def throughput(runs_of: Any, work: list[list[int]], concurrency: int) -> float:
    """Output tokens a second over all of `work`."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        runs = list(pool.map(runs_of, work))
    return sum(int(run.num_tokens) for run in runs) / (time.perf_counter() - began)


def median(values: Any) -> float:
    return float(statistics.median(list(values)))


def measure(lengths: list[int], repeats: int, num_tokens: int, load: tuple[int, int], runs_of: Any) -> dict[str, Any]:
    """Latencies of lone requests by prompt length, then the throughput of many."""
    runs_of(prompts(1, 16, seed=1)[0])  # warm up
    singles = {length: [runs_of(prompt) for prompt in prompts(repeats, length, seed=length)] for length in lengths}
    count, concurrency = load
    return {"singles": singles, "throughput": throughput(runs_of, prompts(count, 64, seed=9), concurrency)}


def print_singles(out: report.Report, length: int, served: list[Run], embedded: list[Run]) -> None:
    ttft, base = (1e3 * median(run.ttft_s for run in runs) for runs in (served, embedded))
    out.row("serve", f"TTFT, {length} tokens", ttft, "ms", base, "embedded engine", base / ttft)
    itl, base_itl = (1e3 * median(gap for run in runs for gap in run.gaps_s) for runs in (served, embedded))
    out.row("serve", f"ITL after {length} tokens", itl, "ms", base_itl, "embedded engine", base_itl / itl)
    out.row(
        "serve", f"  added to that TTFT, {length} tokens", ttft - base, "ms", ttft, "the whole", (ttft - base) / ttft
    )
    parts = [parts_of_ttft(run) for run in served]
    for name in parts[0]:
        value = median(part[name] for part in parts)
        out.row("serve", f"  {name}, {length} tokens", value, "ms", ttft, "the whole", value / ttft)


def parts_of_ttft(run: Run) -> dict[str, float]:
    """Where the time went, ms: three parts make the TTFT; transfer and join come after it, before the second token."""
    seen = run.timings
    known = {"of it queue": seen["prefill_queue_us"] / 1e3, "of it prefill": seen["prefill_compute_us"] / 1e3}
    rest = {"of it router and wire": 1e3 * run.ttft_s - sum(known.values())}
    after = {"then transfer": seen["prefill_transfer_us"] / 1e3, "then join": seen["decode_join_us"] / 1e3}
    return known | rest | after


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker and of the engine")
    options = parser.parse_args()
    lengths, repeats, num_tokens, load = [128, 512, 2048], 5, 32, (24, 8)
    if options.quick:
        lengths, repeats, num_tokens, load = [128, 512], 3, 16, (8, 4)
    shape = (lengths, repeats, num_tokens, load)
    with Engine("smollm2", EngineOptions(num_threads=options.threads)) as engine:
        embedded = measure(*shape, lambda prompt: run_embedded(engine, prompt, num_tokens))
    with platform(options.threads) as (port, model):
        served = measure(*shape, lambda prompt: run_platform(port, model, prompt, num_tokens))
    with report.Report(as_json=options.json) as out:
        for length in lengths:
            print_singles(out, length, served["singles"][length], embedded["singles"][length])
        value, base = served["throughput"], embedded["throughput"]
        out.row("serve", f"throughput, {load[1]} at once", value, "tokens/s", base, "embedded engine", value / base)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
