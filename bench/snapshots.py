"""How much of a prefix cache is left where layers are recurrent: snapshots of states against pages of tokens alone.

    python bench/snapshots.py [--trace FILE] [--first 0] [--requests 2000] [--warm 0] [--seed 0] [--pool-tokens 4000000]
        [--state-tokens 3200]

Replays prompts on the KV cache of one worker, one after the other, and counts the tokens that need not be computed:
with keys and values alone, which can begin at any page, and with states, which begin at snapshots. The prompts are
those of a trace (Mooncake's format: hashes of blocks of 512 tokens), and drawn ones of agents that share system
prompts, fork, and go back. Nothing in it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams

BLOCK: Final = 512  # tokens of a hash of the trace
PAGE: Final = 64  # tokens: large, so that a replay is short
LAST: Final = -1  # names the last token of a prompt, which no other one has
ONE: Final = SamplingParams(max_tokens=1)
EXTRA: Final = (0.0, 0.05, 0.1, 0.2)  # of the pool, for states
UNLIMITED: Final = 1_000_000_000  # tokens
NUM_AGENTS: Final = 300  # at work at once
MAX_CONTEXT: Final = 60_000  # tokens: an agent ends there

Text = tuple[tuple[int, int], ...]  # pieces: a name, and how many tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--first", type=int, default=0, help="prompt of the trace")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm", type=int, default=0, help="prompts that come first and are not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the agents")
    parser.add_argument("--pool-tokens", type=int, default=4_000_000)
    parser.add_argument(
        "--state-tokens", type=int, default=3200, help="whose KV is as large as a state: Qwen3-Next 80B"
    )
    args = parser.parse_args()
    if args.trace is not None:
        lines = args.trace.read_text().splitlines()[args.first :][: args.requests]
        compare("trace", [traced(json.loads(line)) for line in lines], args.warm, args.pool_tokens, args.state_tokens)
    drawn = list(islice(agents(random.Random(args.seed)), args.requests))
    compare("agents", drawn, args.warm, args.pool_tokens, args.state_tokens)


def compare(name: str, texts: Sequence[Text], warm: int, pool_tokens: int, state_tokens: int) -> None:
    """Print a table of one load, of what comes behind the first `warm` prompts."""
    total = sum(length for text in texts[warm:] for _, length in text)
    pages_per_state = -(-state_tokens // PAGE)
    print(f"{name}: {len(texts) - warm} prompts, {total:,} tokens; a state is as large as {state_tokens} tokens")
    found = [0] * warm + found_of(texts, pool_tokens, 0)[warm:]
    alone = sum(found)
    print(f"  {'keys and values alone':<32} {alone / total:.3f} of the tokens reused")
    for extra in EXTRA:
        kept = sum(found_of(texts, int(pool_tokens * (1 + extra)), pages_per_state)[warm:])
        known = foreseen(texts, found, int(pool_tokens * extra), state_tokens)
        print(
            f"  with states, {extra:4.0%} more memory {'':<5} {kept / total:.3f}: {kept / alone:.3f} of those;"
            f" with foresight {known / alone:.3f}"
        )
    best, kept = (sum(found_of(texts, UNLIMITED, size)[warm:]) for size in (0, pages_per_state))
    print(f"  {'with states, memory unlimited':<32} {kept / total:.3f}: {kept / best:.3f} of those alone then")


def traced(entry: dict[str, Any]) -> Text:
    """Return the whole blocks, and one token that stands for the last one, of which the trace knows a part."""
    num_blocks = int(entry["input_length"]) // BLOCK
    blocks = tuple((int(block), BLOCK) for block in entry["hash_ids"][:num_blocks])
    return (*blocks, (LAST, 1))


def agents(rng: random.Random) -> Iterator[Text]:
    """Yield prompts of agents, each as long as they are at work: a context that grows, is forked, and is gone back in.

    A few system prompts with tools are most agents'; one in ten steps sends out two to four others with the same
    context, and one in ten gives up what the last one or two have led to.
    """
    names = count(1)
    systems = [((next(names), rng.randint(500, 6000)),) for _ in range(40)]
    at_work: list[list[Text]] = []  # the contexts of each, the newest last
    while True:
        while len(at_work) < NUM_AGENTS:
            system = systems[min(int(rng.paretovariate(0.7)), len(systems)) - 1]
            at_work.append([(*system, (next(names), rng.randint(100, 4000)))])
        at = int(len(at_work) * rng.random() ** 2)  # some are quicker
        contexts = at_work[at]
        chance = rng.random()
        if chance < 0.1:
            at_work += [[(*contexts[-1], (next(names), rng.randint(50, 500)))] for _ in range(rng.randint(2, 4))]
        if chance > 0.9:
            del contexts[max(1, len(contexts) - rng.randint(1, 2)) :]
        yield (*contexts[-1], (LAST, 1))
        contexts.append((*contexts[-1], (next(names), min(int(rng.lognormvariate(6.5, 1)), 8000))))
        if rng.random() < 0.06 or sum(length for _, length in contexts[-1]) > MAX_CONTEXT:
            del at_work[at]


def tokens_of(text: Text) -> I64:
    """Return the same tokens for the same pieces."""
    return np.concatenate([(name << 24) + np.arange(length, dtype=np.int64) for name, length in text])


def found_of(texts: Sequence[Text], pool_tokens: int, pages_per_state: int) -> list[int]:
    """Return how many tokens were not computed, of each prompt."""
    longest = max(sum(length for _, length in text) for text in texts)
    cache = KvCache(
        num_pages=pool_tokens // PAGE,
        page_size=PAGE,
        max_requests=1,
        max_tokens_per_request=longest + PAGE,
        pages_per_state=pages_per_state,
    )
    return [serve(cache, room, tokens_of(text)) for room, text in enumerate(texts)]


def foreseen(texts: Sequence[Text], found: Sequence[int], room_tokens: int, state_tokens: int) -> float:
    """Return how many of the tokens `found` with keys and values alone can be reused with states, at most.

    States take `room_tokens` at most beside the text, and each `state_tokens`. One that a prompt begins with was made
    or read by the last prompt that had the same text, and was kept since: its cost is its size, for so many prompts.
    Any choice that fits has no higher cost in all than the room, for all prompts. So for any price of the room, what
    the best choices save beyond what they cost, and the room's price, is a bound (Lagrange's); the lowest is returned.
    """
    last: dict[int, int] = {}
    choices: list[list[tuple[int, int]]] = []  # of each prompt: (tokens saved, cost)
    for now, (text, most) in enumerate(zip(texts, found, strict=True)):
        ends = accumulate(length for _, length in text)
        known = [(min(end, most), last.get(name)) for (name, _), end in zip(text, ends, strict=True)]
        choices.append([(end, state_tokens * (now - then - 1)) for end, then in known if then is not None])
        last |= {name: now for name, _ in text if name != LAST}

    def bound(price: float) -> float:
        saved = sum(max([0.0, *(tokens - price * cost for tokens, cost in each)]) for each in choices)
        return price * room_tokens * len(texts) + saved

    low, high = 0.0, 1.0
    for _ in range(40):
        third = (high - low) / 3
        low, high = (low, high - third) if bound(low + third) < bound(high - third) else (low + third, high)
    return min(bound(0.0), bound(low))


def serve(cache: KvCache, room: int, tokens: I64) -> int:
    """Compute a prompt as steps do, and let it go; return how many of its tokens were cached."""
    request = new_request(room, tokens, ONE)
    assert cache.admit(request)
    found = request.cached_len
    for end in request.cuts:
        cache.begin_snapshot(request, end)
        cache.release_duplicates(cache.share(request, end))
    request.computed_len = len(tokens)
    cache.retire(request)
    return found


if __name__ == "__main__":
    main()
