"""vLLM's side of `bench/engine.py`: a process of its own, because its packages exclude ours.

    python vllm_peer.py FOLDER THREADS        (started by engine.py with an interpreter that has vLLM)

One JSON line in, `{"num_prompts": N, "prompt_len": L, "num_tokens": T}`, one out: the seconds of that generation.
Every prompt differs from all before it, and prefix caching is off: nothing is found in a cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CPUS = range(os.cpu_count() or 1)


def main(folder: str, num_threads: int) -> None:
    """Serve until standard input ends."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}-{num_threads - 1}" if num_threads > 1 else str(CPUS[0]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to standard output
    engine = load(folder)
    print("ready", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        print(run(engine, number, **json.loads(line)), file=answers, flush=True)


def load(folder: str) -> Any:
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    return LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        seed=0,
    )


def run(engine: Any, number: int, num_prompts: int, prompt_len: int, num_tokens: int) -> float:
    """Return how long the prompts and `num_tokens` tokens of each take, in seconds."""
    from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(7 * number + 31 * row + i) % 40_000 + 100 for i in range(prompt_len)]}
        for row in range(num_prompts)
    ]
    started = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
