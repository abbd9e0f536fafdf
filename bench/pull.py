"""Prefixes that are pulled from who has them: as fast as a hand-off, and what twenty turns of a chat gain by it.

    python bench/pull.py [--quick] [--json]

Speed: the same pages (256 MiB, verified) by a hand-off whose prompt is cached, from grant to verification, and by
a pull, from the leg's arrival to the step that finds them; between two processes, in turns.
Turns: the time to the first token of a chat on two prefill and two decode workers with a simulated model, pulls on and
off, the later one of two such chats on each platform; the first turn is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from handoff import MODEL, PROMPT_LEN
from report import Report, arguments
from scheduler_pair import SchedulerPair

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.lanes import Transports
from diptych.v1 import worker_pb2

BENCH: Final = "pull"
TRANSPORTS: Final[tuple[Transports, ...]] = ("shm", "tcp")
NUM_TURNS: Final = 20
PACES_US: Final = (1000, 400)  # of a token of a prompt
NUM_NEW, NUM_OUTPUT = 32, 256  # tokens of each turn
START_S: Final = 200.0
PLATFORM: Final = ("--prefill", "2", "--decode", "2", "--device", "sim", "--model", "sim", "--max-model-len", "8000")
VARIABLES: Final = {
    "DIPTYCH_KV_CACHE_MIB": "64",
    "DIPTYCH_GRPC_PORT": "0",
    "DIPTYCH_BOOTSTRAP_PORT": "0",
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder, Report(as_json=options.json) as report:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for transports in TRANSPORTS:
            asyncio.run(_compare(report, folder, transports, 4 if options.quick else 9))
        for token_us in PACES_US[: 1 if options.quick else None]:
            _compare_turns(report, token_us)


# speed


async def _compare(report: Report, model: str, transports: Transports, rounds: int) -> None:
    engine = EngineOptions(
        model=model,
        load_format="dummy",
        device="sim",
        sim_timing=("none",),
        kv_cache_mib=1024,
        max_step_tokens=2 * PROMPT_LEN,
    )
    rules = TransferRules("always", pulls=True)
    rng = random.Random(0)
    handed: list[float] = []
    pulled: list[float] = []
    async with SchedulerPair(engine, rules, transports, roles=("unified", "unified")) as pair:
        for number in range(rounds):
            prompts = [[rng.randrange(1, 1000) for _ in range(PROMPT_LEN + 1)] for _ in range(2)]
            for offset, prompt in enumerate(prompts):
                await pair.prefill.local(8 * number + offset + 1, prompt)
            handed.append(await _hand_off(pair, 8 * number + 4, prompts[0]))
            pulled.append(await _pull(pair, 8 * number + 5, prompts[1]))
        status = await pair.decode.ask_status()
    assert status.pages_pulled == rounds * PROMPT_LEN // 16, status.pages_pulled
    value, limit = statistics.median(pulled[1:]), statistics.median(handed[1:])  # the first are a warm-up
    report.row(BENCH, f"{transports}/{PROMPT_LEN} tokens", value, "GB/s", limit, "hand-off, same run", value / limit)


def _num_bytes() -> int:
    heads, dim, layers = MODEL["num_key_value_heads"], MODEL["head_dim"], MODEL["num_hidden_layers"]
    assert isinstance(heads, int)
    assert isinstance(dim, int)
    assert isinstance(layers, int)
    return PROMPT_LEN * 2 * heads * dim * layers * 4


async def _hand_off(pair: SchedulerPair, room: int, prompt: Sequence[int]) -> float:
    """Return GB/s from the grant on: prefill has the prompt cached, and computes a token."""
    await pair.decode.start_leg(room, prompt, 2, worker_pb2.LEG_KIND_DECODE, pair.prefill.instance_id)
    await pair.prefill.start_leg(room, prompt, 2, worker_pb2.LEG_KIND_PREFILL, pair.decode.instance_id)
    last = (await pair.decode.wait_for(room)).last
    assert last is not None
    return _num_bytes() / (last.stats.transfer_us + last.stats.verify_us) / 1e3


async def _pull(pair: SchedulerPair, room: int, prompt: Sequence[int]) -> float:
    holder = worker_pb2.PrefixHolder(instance_id=pair.prefill.instance_id, num_tokens=len(prompt))
    await pair.decode.start_leg(room, prompt, 2, worker_pb2.LEG_KIND_LOCAL, holder=holder)
    last = (await pair.decode.wait_for(room)).last
    assert last is not None
    assert last.stats.cached_tokens == PROMPT_LEN
    return _num_bytes() / last.stats.queue_us / 1e3


# turns


def _compare_turns(report: Report, token_us: int) -> None:
    without, _ = _turns("off", token_us)
    value, cached = _turns("on", token_us)
    case = f"{NUM_TURNS} turns/ttft p50/{1e6 / token_us:,.0f} tokens a second"
    report.row(BENCH, case, value, "ms", without, "without", value / without, cached)


def _turns(pull: str, token_us: int) -> tuple[float, dict[str, float]]:
    """Return the median time to the first token in ms, and how many tokens prefill computed of a turn in the median."""
    with _platform(pull, token_us) as port:
        for number in range(2):
            times, computed = _chat(port, number)
    return statistics.median(times) * 1e3, {"tokens computed of a turn": statistics.median(computed)}


@contextmanager
def _platform(pull: str, token_us: int) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "diptych.cli", "up", "--http-port", str(port), *PLATFORM]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(pull, token_us)
    )
    try:
        _wait_until_ready(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _environment(pull: str, token_us: int) -> dict[str, str]:
    timing = f"step=1000,prompt={token_us},request=0,context=0"
    return {**os.environ, **VARIABLES, "DIPTYCH_KV_PULL": pull, "DIPTYCH_SIM_TIMING": timing}


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until_s:
        try:
            _complete(port, [1, 2, 3], 1)
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("the platform did not start")


def _chat(port: int, number: int) -> tuple[list[float], list[float]]:
    rng = random.Random(number)
    prompt, times, computed = rng.choices(range(100, 200), k=NUM_OUTPUT), list[float](), list[float]()
    for _ in range(NUM_TURNS):
        prompt += rng.choices(range(100, 200), k=NUM_NEW)
        first_s, output, num_cached = _complete(port, prompt, NUM_OUTPUT)
        times.append(first_s)
        computed.append(len(prompt) - num_cached)
        prompt += output
    return times[1:], computed[1:]


def _complete(port: int, prompt: Sequence[int], max_tokens: int) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the output, and how many tokens of the prompt were cached."""
    body = {"model": "", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    began_s, first_s, output, num_cached = time.monotonic(), 0.0, list[int](), 0
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        for line in answer:
            event: dict[str, Any] = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            for choice in event.get("choices", ()):
                output += choice.get("token_ids") or ()
            first_s = first_s or (time.monotonic() - began_s if output else 0.0)
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first_s, output, num_cached


if __name__ == "__main__":
    main()
