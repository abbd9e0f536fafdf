"""Sizes of steps that a worker finds itself against given ones: a burst of requests through the whole engine, in turns.

Llama-3-8B by shape with made-up weights. All requests are asked at once, random prompts that nobody has cached, greedy,
of a fixed length, the same for all settings: mix A has 512 to 2,048 tokens in and 128 to 256 out, mix B 64 to 512 in
and 256 to 512 out. Output tokens/s over the whole burst, and the gap between two tokens of a request at the 99th
percentile. The limit of the sizes that were found is the best of the given ones.

    python bench/gpu/defaults.py [--settings 8192/512 8192/256 2048/256 512/64] [--quick] [--json]
    python bench/gpu/defaults.py --device sim --quick     # a simulated H200: shows that it works, on any machine
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from llama_8b import CONFIG, model_folder
from report import Report, arguments

from diptych.common.members.roles import Role
from diptych.embedded.data_parallel_controller import DataParallelController, EnginePrompt
from diptych.embedded.group import Group
from diptych.engine import EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import start_scheduler
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1.engine_pb2 import SchedulerReady

FOUND: Final = "found"  # the setting that names no size
SETTINGS: Final = ("8192/512", "8192/256", "2048/256", "512/64")  # tokens a step / requests at once
NUM_REQUESTS: Final = 512
SIM: Final[Mapping[str, Any]] = {"device": "sim", "kv_cache_mib": 208}  # of the tiny model: 850,000 tokens
TINY: Final = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WAKE: Final = (64, 96, 8, 16)  # a small burst before each setting: graphs are captured at their first use


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of prompts and outputs, uniform between two ends."""

    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]

    def requests(self, count: int, seed: int) -> list[tuple[list[int], int]]:
        """Return prompts, and how many tokens each gets."""
        rng, vocab_size = random.Random(seed), CONFIG["vocab_size"] - 1000  # no special tokens
        lens = [(rng.randint(*self.prompt_lens), rng.randint(*self.output_lens)) for _ in range(count)]
        return [(rng.choices(range(vocab_size), k=prompt_len), output_len) for prompt_len, output_len in lens]


MIXES: Final[Mapping[str, Mix]] = {"A": Mix((512, 2048), (128, 256)), "B": Mix((64, 512), (256, 512))}


@dataclass(frozen=True, slots=True)
class Burst:
    """What came of all requests of a mix."""

    output_tokens_per_s: float
    gap_p99_s: float
    ttft_p50_s: float


@asynccontextmanager
async def engine(options: EngineOptions) -> AsyncIterator[tuple[DataParallelController, SchedulerReady]]:
    config = SchedulerConfig(
        component="engine",
        log_format="text",
        log_level="info",  # says which sizes were found
        instance_id=1,
        transports="auto",
        transfer=TransferRules(),
        engine=options,
        role=Role.LOCAL.value,
    )
    group = Group(await start_scheduler(config), config.instance_id, Role.LOCAL, options.page_size)
    try:
        ready = await group.scheduler.ready()
        running = asyncio.create_task(group.run())
        yield DataParallelController([group], "round_robin", options.page_size), ready
        running.cancel()
    finally:
        await group.scheduler.stop()


async def stamps_of(controller: DataParallelController, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """Return when each token came."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    stamps: list[float] = []
    attempt = controller.start(EnginePrompt(prompt), params, "")
    while len(stamps) < num_tokens:
        delta = await attempt.next()
        stamps += [time.perf_counter()] * len(delta.token_ids)
    return stamps


async def burst(controller: DataParallelController, requests: Sequence[tuple[list[int], int]]) -> Burst:
    began_s = time.perf_counter()
    stamps = await asyncio.gather(*(stamps_of(controller, *request) for request in requests))
    took_s = time.perf_counter() - began_s
    gaps = [later - sooner for each in stamps for sooner, later in itertools.pairwise(each)]
    return Burst(
        sum(map(len, stamps)) / took_s,
        statistics.quantiles(gaps, n=100)[98],
        statistics.median(each[0] - began_s for each in stamps),
    )


async def measure(setting: str, options: EngineOptions, count: int) -> tuple[str, dict[str, Burst]]:
    """Return the setting's sizes in words, and the bursts of each mix."""
    if setting != FOUND:
        step_tokens, requests = map(int, setting.split("/"))
        options = replace(options, max_step_tokens=step_tokens, max_requests=requests)
    async with engine(options) as (controller, ready):
        low, high, short, long = WAKE
        await burst(controller, Mix((low, high), (short, long)).requests(count, seed=1))
        found = {name: await burst(controller, mix.requests(count, seed=2)) for name, mix in MIXES.items()}
    sizes = f"{ready.max_step_tokens}/{ready.max_requests}"
    return (f"{FOUND}: {sizes}" if setting == FOUND else sizes), found


def add_to_report(report: Report, bursts: Mapping[str, Mapping[str, Burst]]) -> None:
    """`bursts` are those of the sizes that were found, and then of the given ones."""
    given = list(bursts.values())[1:]
    for mix in MIXES:
        best = max((each[mix].output_tokens_per_s for each in given), default=None)
        for sizes, each in bursts.items():
            value = each[mix].output_tokens_per_s
            ratio = value / best if best else None
            report.row("gpu/defaults", f"mix {mix}, {sizes}", value, "tokens/s", best, "the best given", ratio)
            report.row("gpu/defaults", f"  gap p99, mix {mix}, {sizes}", 1e3 * each[mix].gap_p99_s, "ms")
            report.row("gpu/defaults", f"  TTFT p50, mix {mix}, {sizes}", each[mix].ttft_p50_s, "s")


def options_of(args: Namespace, model: str) -> EngineOptions:
    changes = SIM if args.device == "sim" else {"device": args.device}
    return EngineOptions(model=model, load_format="dummy", kv_events="off", **changes)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--settings", nargs="*", default=SETTINGS, metavar="TOKENS/REQUESTS", help="beside those found")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    args = parser.parse_args()
    count = 64 if args.quick else NUM_REQUESTS
    settings = [FOUND, *(args.settings[:1] if args.quick else args.settings)]
    config = {**CONFIG, **(TINY if args.device == "sim" else {})}
    with model_folder(config) as folder, Report(as_json=args.json) as report:
        options = options_of(args, str(folder))
        add_to_report(report, dict(asyncio.run(measure(setting, options, count)) for setting in settings))


if __name__ == "__main__":
    main()
