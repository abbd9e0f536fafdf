"""What models with windows gain by keeping only what is seen of them: `--kv-windows free`, with `keep` beside it.

    python bench/windows.py [--quick] [--json] [--only NAME]

Of published shapes, with cores of workers over a model that computes nothing: the bytes that are handed over for a
prompt, the requests that decode at once and the longest one in a pool of the same bytes, what a decode step costs the
scheduler, and how much of a load of conversations is found cached. The limit is what is live: all tokens in layers
that see all, a window in the others. Then a small random model of the same family, computed on this machine.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from report import Report, arguments
from snapshots import Text, agents, tokens_of
from window_cores import CONFIGS, PAGE, VOCAB, Pair, Shape, cached_tokens, local_core, shapes, start, step

from diptych.common.arrays import I64
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.options.config import KvWindows

GIB: Final = 2**30
POOL_NBYTES: Final = 16 * GIB
PROMPT_LEN, OUTPUT_LEN = 8192, 1024  # of those that decode at once
HANDED: Final = (1024, 8192, 32_768, 131_072)
MOST_TOKENS: Final = 1 << 24  # longer than what fits any pool here
STEPPED_LEN: Final = 1600  # of requests whose steps are timed: longer than all windows
LONGEST_TEXT: Final = 1 << 17
SMALL: Final[dict[str, Any]] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "sliding_window_pattern": 6,
}
CONTEXTS: Final = (512, 2048)  # tokens: 4 and 16 windows of the small model
NUM_TOGETHER, NUM_OUTPUT = 4, 64


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=BENCHES, action="append", help="measure these alone")
    options = parser.parse_args()
    with Report(as_json=options.json) as report:
        for name in options.only or BENCHES:
            BENCHES[name](report, options.quick)


def bench_handed(report: Report, is_quick: bool) -> None:
    """Bytes of the pages that a prefill core writes for a prompt."""
    for name in CONFIGS:
        for num_tokens in HANDED[: 2 if is_quick else None]:
            kept, freed = (handed_mib(shape, num_tokens) for shape in shapes(name))
            limit = shapes(name)[1].live_nbytes(num_tokens) / 2**20
            compare(report, f"{name}: handed over of {num_tokens:,} tokens", kept, freed, "MiB", limit, limit / freed)


def handed_mib(shape: Shape, num_tokens: int) -> float:
    prompt = np.random.default_rng(0).integers(0, VOCAB, num_tokens)
    return Pair(shape, num_tokens + 2).hand_over(prompt) * shape.page_nbytes / 2**20


def bench_held(report: Report, is_quick: bool) -> None:
    """Requests at once, and the longest one, in a pool of the same bytes."""
    for name in CONFIGS:
        kept, freed = (num_at_once(shape, 60 if is_quick else 100) for shape in shapes(name))
        limit = POOL_NBYTES / shapes(name)[1].live_nbytes(PROMPT_LEN + OUTPUT_LEN // 2)
        case = f"{name}: decoded at once, {PROMPT_LEN:,} + {OUTPUT_LEN:,} tokens"
        compare(report, case, kept, freed, "requests", limit, freed / limit)
        kept, freed = (longest(shape) for shape in shapes(name))
        limit = shapes(name)[1].longest(POOL_NBYTES)
        compare(report, f"{name}: longest request", kept, freed, "tokens", limit, freed / limit)


def num_at_once(shape: Shape, num_requests: int) -> float:
    """Return how many requests have a row in a decode step, in the mean, while more of them wait."""
    max_tokens = PROMPT_LEN + OUTPUT_LEN
    core = local_core(shape.cache(POOL_NBYTES // shape.page_nbytes, num_requests, max_tokens), max_tokens)
    rng, num_rows = np.random.default_rng(0), []
    for room in range(1, num_requests + 1):
        start(core, room, rng.integers(0, VOCAB, PROMPT_LEN), OUTPUT_LEN)
    while core.load().num_waiting and (batch := step(core)) is not None:
        num_rows.append(batch.num_samples)
        core.pop_effects()
    return statistics.mean(num_rows[len(num_rows) // 4 :])


def longest(shape: Shape) -> int:
    return shape.cache(POOL_NBYTES // shape.page_nbytes, 1, MOST_TOKENS).max_request_tokens


def bench_steps(report: Report, is_quick: bool) -> None:
    """Processor time of a decode step: plan, batch and commit. Both ways take turns, step by step."""
    for batch_size in (16, 64, 256):
        for name in CONFIGS:
            both = shapes(name)
            kept, freed = step_us(both, batch_size, 100 if is_quick else 400)
            num_groups = len(both[1].model.page_groups) - 1
            case = f"a step of {batch_size} requests, {num_groups} group{'s' if num_groups > 1 else ''} of windows"
            report.row("windows", case, freed, "us", kept, "keep", kept / freed)


def step_us(both: tuple[Shape, Shape], batch_size: int, num_steps: int) -> tuple[float, float]:
    cores = [stepped_core(shape, batch_size, num_steps) for shape in both]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_steps):
        for core, spent in zip(cores, times, strict=True):
            began = time.process_time()
            step(core)
            core.pop_effects()
            spent.append(time.process_time() - began)
    first, second = (statistics.median(spent) * 1e6 for spent in times)
    return first, second


def stepped_core(shape: Shape, batch_size: int, num_steps: int) -> Any:
    """Return a core whose requests all decode: not all of them need a page in the same step."""
    max_tokens = STEPPED_LEN + 2 * PAGE + 2 * num_steps + batch_size
    core = local_core(shape.cache(batch_size * max_tokens // PAGE * 8, batch_size, max_tokens), max_tokens)
    rng = np.random.default_rng(1)
    for room in range(1, batch_size + 1):
        start(core, room, rng.integers(0, VOCAB, STEPPED_LEN + room % PAGE), max_tokens - STEPPED_LEN - PAGE)
    while core.load().num_running < batch_size:
        step(core)
    core.pop_effects()
    return core


def bench_reuse(report: Report, is_quick: bool) -> None:
    """Tokens of prompts that are found cached, of those that a cache without an end finds."""
    num_prompts = 200 if is_quick else 2000
    for load, texts in (("conversations", conversations(random.Random(0))), ("agents", agents(random.Random(0)))):
        prompts = list(islice(texts, num_prompts))
        for name in CONFIGS:
            kept, freed = shapes(name)
            most = num_reused(kept, prompts, 2 * sum(length for text in prompts for _, length in text) // PAGE)
            for share in (0.05, 0.15, 0.5):
                nbytes = int(share * distinct(prompts)) // PAGE * kept.page_nbytes
                old, new = (num_reused(shape, prompts, nbytes // shape.page_nbytes) / most for shape in (kept, freed))
                case = f"{name}: reused by {load}, pool for {share:.0%} of the text"
                compare(report, case, old, new, "of reusable", 1.0, new, "unlimited")


def conversations(rng: random.Random) -> Iterator[Text]:
    """Yield the prompts of 100 conversations at a time: each turn adds a question and the answer before it."""
    names = iter(range(1, 1 << 30))
    open_ones: list[Text] = []
    while True:
        while len(open_ones) < 100:
            open_ones.append(((next(names), rng.randint(200, 4000)),))
        at = rng.randrange(len(open_ones))
        yield open_ones[at]
        open_ones[at] = (*open_ones[at], (next(names), rng.randint(100, 1500)))
        if rng.random() < 0.1:
            del open_ones[at]


def distinct(prompts: list[Text]) -> int:
    """Return how many tokens there are, each counted once."""
    return sum({piece: piece[1] for text in prompts for piece in text}.values())


def num_reused(shape: Shape, prompts: list[Text], num_pages: int) -> int:
    """Serve prompts one after the other, each with one token of output; return how many tokens were not computed."""
    core = local_core(shape.cache(num_pages, 1, LONGEST_TEXT), LONGEST_TEXT)
    found = 0
    for room, text in enumerate(prompts, 1):
        start(core, room, tokens_of(text) % VOCAB, 1)
        while step(core) is not None:
            pass
        found += cached_tokens(core.pop_effects())
    return found


@dataclass(frozen=True)
class Speed:
    """Processor seconds of a prompt, and of the outputs of several requests behind it but their first tokens."""

    prompt_s: float
    output_s: float


def bench_engine(report: Report, is_quick: bool) -> None:
    """Tokens a second of processor time, of a small random model of Gemma 3's kind with one thread."""
    ways: tuple[KvWindows, KvWindows] = ("keep", "free")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL))
        options = [EngineOptions(load_format="dummy", num_threads=1, kv_cache_mib=512, kv_windows=way) for way in ways]
        with Engine(folder, options[0]) as keep, Engine(folder, options[1]) as free:
            for num_tokens in CONTEXTS[: 1 if is_quick else None]:
                kept, freed = best_speeds((keep, free), num_tokens, 2 if is_quick else 5)
                case = f"small model, {num_tokens // SMALL['sliding_window']} windows"
                for what, num_made, keep_s, free_s in (
                    ("prompt", num_tokens, kept.prompt_s, freed.prompt_s),
                    ("output", NUM_TOGETHER * NUM_OUTPUT, kept.output_s, freed.output_s),
                ):
                    limit = num_made / keep_s
                    report.row(
                        "windows", f"{case}: {what}", num_made / free_s, "tokens/s", limit, "keep", keep_s / free_s
                    )


def best_speeds(engines: tuple[Engine, Engine], num_tokens: int, rounds: int) -> list[Speed]:
    """Let engines take turns with the same prompts; return the best of each."""
    rng = np.random.default_rng(2)
    prompts = rng.integers(1, SMALL["vocab_size"], (rounds, NUM_TOGETHER, num_tokens))
    runs = [[run_engine(engine, prompt) for engine in engines] for prompt in prompts]
    return [
        Speed(min(run.prompt_s for run in own), min(run.output_s for run in own)) for own in zip(*runs, strict=True)
    ]


def run_engine(engine: Engine, prompts: I64) -> Speed:
    batch = [prompt.tolist() for prompt in prompts]
    prompt_s = spent_s(engine, lambda: engine.generate(batch[0], greedy(1)))
    engine.generate_batch(batch, greedy(1))  # both times behind the same cached prompts
    first_s = spent_s(engine, lambda: engine.generate_batch(batch, greedy(1)))
    return Speed(prompt_s, spent_s(engine, lambda: engine.generate_batch(batch, greedy(1 + NUM_OUTPUT))) - first_s)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def spent_s(engine: Engine, work: Callable[[], object]) -> float:
    """Return the processor time that the engine's scheduler, whose thread is the model's, needs for `work`."""
    (pid,) = engine.scheduler_pids
    before = psutil.Process(pid).cpu_times()
    work()
    after = psutil.Process(pid).cpu_times()
    return after.user + after.system - before.user - before.system


def compare(
    report: Report, case: str, kept: float, freed: float, unit: str, limit: float, ratio: float, limit_is: str = "live"
) -> None:
    """Add what `free` has, beside the limit and `keep`."""
    peers = {"keep": kept, "free / keep": freed / kept}
    report.row("windows", case, freed, unit, limit, limit_is, ratio, peers)


BENCHES: Final[dict[str, Callable[[Report, bool], None]]] = {
    "handed": bench_handed,
    "held": bench_held,
    "steps": bench_steps,
    "reuse": bench_reuse,
    "engine": bench_engine,
}


if __name__ == "__main__":
    main()
