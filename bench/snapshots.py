"""How much of a prefix cache is left where layers are recurrent: snapshots of states against pages of tokens alone.

    python bench/snapshots.py --trace FILE [--requests 3000] [--pool-tokens 1000000]

Replays a trace of prompts (Mooncake's format: hashes of blocks of 512 tokens) on the KV cache of one worker, one prompt
after the other, and counts the tokens that need not be computed: with keys and values alone, which can begin at any
page, and with states, which begin at snapshots. Nothing in it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams

BLOCK = 512  # tokens of a hash of the trace
PAGE = 64  # tokens: large, so that a replay is short
ONE = SamplingParams(max_tokens=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--pool-tokens", type=int, default=1_000_000)
    parser.add_argument(
        "--state-tokens", type=int, default=3200, help="whose KV is as large as a state: Qwen3-Next 80B"
    )
    args = parser.parse_args()
    lines = args.trace.read_text().splitlines()[: args.requests]
    prompts = [tokens for line in lines if len(tokens := prompt(json.loads(line)))]
    total = sum(map(len, prompts))
    alone = reused(prompts, args.pool_tokens, 0)
    print(f"{len(prompts)} prompts, {total:,} tokens; a state is as large as {args.state_tokens} tokens")
    print(f"{'keys and values alone':<32} {alone / total:.3f} of the tokens reused")
    for extra in (0.0, 0.05, 0.1, 0.2):
        kept = reused(prompts, int(args.pool_tokens * (1 + extra)), -(-args.state_tokens // PAGE))
        print(f"with states, {extra:4.0%} more memory {'':<5} {kept / total:.3f}: {kept / alone:.3f} of those")


def prompt(entry: dict[str, Any]) -> I64:
    """Return the tokens of the whole blocks: the same for the same hashes. Of the last block the trace knows a part."""
    num_blocks = int(entry["input_length"]) // BLOCK
    blocks = np.repeat(np.array(entry["hash_ids"][:num_blocks], np.int64), BLOCK)
    return blocks * BLOCK + np.arange(len(blocks)) % BLOCK


def reused(prompts: list[I64], pool_tokens: int, pages_per_state: int) -> int:
    """Return how many tokens were not computed."""
    cache = KvCache(
        num_pages=pool_tokens // PAGE,
        page_size=PAGE,
        max_requests=1,
        max_tokens_per_request=pool_tokens,
        pages_per_state=pages_per_state,
    )
    total = 0
    for room, tokens in enumerate(prompts):
        request = new_request(room, tokens, ONE)
        if not cache.admit(request):
            continue
        total += request.cached_len
        for end in request.cuts:
            cache.begin_snapshot(request, end)
            cache.release_duplicates(cache.share(request, end))
        request.computed_len = len(tokens)
        cache.retire(request)
    return total


if __name__ == "__main__":
    main()
