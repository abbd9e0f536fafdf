"""Prompts through two stages on two GPUs (`--pp 2`), beside `--tp 2` and one GPU: prompt tokens a second.

Prompts of Llama-3-8B's shape with made-up weights, all sent at once, one token out each: chunks of one prompt, and of
several, are in flight. Each engine is one of its own, one after the other; the better of two bursts counts, after one
that nobody counts. The limit is twice what one GPU does: two stages that never wait.

    PYTHONPATH=bench python bench/gpu/pipeline.py [--quick] [--json]
    ... --device cpu --quick   # a tiny shape: shows that it works, on any machine

Needs two GPUs; each engine takes about 20 s.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llama_8b import CONFIG, model_folder
from report import Report, arguments

from diptych.engine import Engine, EngineOptions, SamplingParams

BENCH: Final = "gpu/pipeline"
TINY: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 320,
} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LOADS: Final[Mapping[str, tuple[int, int]]] = {
    "16 x 2,048": (16, 2048),
    "16 x 8,192": (16, 8192),
    "1 x 32,000": (1, 32_000),
}
TINY_LOADS: Final[Mapping[str, tuple[int, int]]] = {"4 x 300": (4, 300)}
SIDES: Final[Mapping[str, Mapping[str, Any]]] = {"one GPU": {}, "tp 2": {"tp": 2}, "pp 2": {"pp": 2}}
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
BURSTS: Final = 3


def burst(engine: Engine, num_ids: int, count: int, num_tokens: int, seed: int) -> float:
    """Return prompt tokens a second."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(2, num_ids), k=num_tokens) for _ in range(count)]
    began_s = time.perf_counter()
    engine.generate_batch(prompts, ONE_TOKEN)
    return count * num_tokens / (time.perf_counter() - began_s)


def speeds(folder: Path, num_ids: int, loads: Mapping[str, tuple[int, int]], options: Mapping[str, Any]) -> list[float]:
    with Engine(str(folder), EngineOptions(load_format="dummy", kv_events="off", **options)) as engine:
        bursts = [[burst(engine, num_ids, *load, seed) for load in loads.values()] for seed in range(BURSTS)]
    return [max(counted) for counted in zip(*bursts[1:], strict=True)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    shape, loads = dict(CONFIG) | (dict(TINY) if on_cpu else {}), TINY_LOADS if on_cpu else LOADS
    if options.quick and not on_cpu:
        loads = dict(list(loads.items())[1:2])
    with Report(as_json=options.json) as rows, model_folder(shape) as folder:
        asked: dict[str, Any] = {"device": options.device}
        found = {name: speeds(folder, shape["vocab_size"], loads, asked | dict(side)) for name, side in SIDES.items()}
        for number, load in enumerate(loads):
            one, tp, pp = (found[name][number] for name in SIDES)
            rows.row(BENCH, f"pp 2, {load}", pp, "tok/s", 2 * one, "two GPUs alone", pp / (2 * one), {"tp 2": tp})


if __name__ == "__main__":
    main()
