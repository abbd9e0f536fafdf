"""What handing its KV over adds to a request: first token computed to decode's acknowledgement, over real processes.

By layers behind the last step, against whole pages after it, against the same hand-off of one page: what is left when
there is next to nothing to move. Each run is one long prompt in one step, whose pages nobody has cached.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Final

from report import Report, arguments
from scheduler_pair import SchedulerPair

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.lanes import Transports
from diptych.v1.worker_pb2 import LegStats

BENCH: Final = "handoff"
PROMPT_LEN: Final = 2048
SHORT_LEN: Final = 16
TRANSPORTS: Final[tuple[Transports, ...]] = ("shm", "tcp")
RULES: Final = {
    "by layers": TransferRules("off", num_windows=4),
    "whole pages after": TransferRules("off"),
    "by layers, verified": TransferRules("always", num_windows=4),
    "whole pages after, verified": TransferRules("always"),
}
MODEL: Final = {  # 64 KiB of KV a token, as of a model of 8 billion parameters in fp8
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder, Report(as_json=options.json) as report:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for transports in TRANSPORTS[:1] if options.quick else TRANSPORTS:
            asyncio.run(_compare(report, folder, transports, 3 if options.quick else 7))


async def _compare(report: Report, model: str, transports: Transports, rounds: int) -> None:
    for name, rules in RULES.items():
        short_ms, long_ms, compute_ms = await _measure(model, transports, rules, rounds)
        case = f"{transports}/{PROMPT_LEN} tokens/{name}"
        peers = {"computing the prompt": compute_ms}
        report.row(BENCH, case, long_ms, "ms", short_ms, "one page", short_ms / long_ms, peers)


async def _measure(model: str, transports: Transports, rules: TransferRules, rounds: int) -> tuple[float, float, float]:
    """Return medians: what a short prompt adds and what a long one adds, and how long that took to compute."""
    engine = EngineOptions(model=model, load_format="dummy", kv_cache_mib=512, max_step_tokens=2 * PROMPT_LEN)
    rng = random.Random(0)
    measured: dict[int, list[LegStats]] = {SHORT_LEN: [], PROMPT_LEN: []}
    async with SchedulerPair(engine, rules, transports) as pair:
        for room in range(1, 2 * (rounds + 1), 2):
            for offset, length in enumerate(measured):
                prompt = [rng.randrange(1, 1000) for _ in range(length)]
                prefill, _ = await pair.request(room + offset, prompt)
                assert prefill.last is not None
                assert prefill.last.stats.pages_moved
                measured[length].append(prefill.last.stats)
    short, long = (stats[1:] for stats in measured.values())  # the first is a warm-up
    return (
        statistics.median(stats.added_ttft_us / 1e3 for stats in short),
        statistics.median(stats.added_ttft_us / 1e3 for stats in long),
        statistics.median(stats.compute_us / 1e3 for stats in long),
    )


if __name__ == "__main__":
    main()
