"""Requests to replay: a trace in Mooncake's format, or a synthetic one with the same shape."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from diptych.common.arrays import U64
from diptych.simulator.traces import call, mooncake
from diptych.simulator.traces.call import Call, names_of

BLOCK_TOKENS: Final = call.BLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class TracedRequest:
    arrival_s: float
    prompt_len: int
    output_len: int
    blocks: U64  # hashes of the prompt's blocks, the last of which need not be full
    block_list: Sequence[int]  # the same, for code that looks at them one by one

    @property
    def num_blocks(self) -> int:
        return len(self.block_list)


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Read a trace file, or its first `limit` requests."""
    with path.open(encoding="utf-8") as lines:
        return [_traced(each) for each in mooncake.read(itertools.islice(lines, limit))]


def parse_rows(rows: Iterable[mooncake.Row]) -> list[TracedRequest]:
    """Make requests of rows, in the order of their timestamps."""
    return [_traced(each) for each in mooncake.calls_of(rows)]


def whole_blocks(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """Let every prompt end with its last block and answer with one token, as replays that count blocks do."""
    return [replace(request, prompt_len=BLOCK_TOKENS * request.num_blocks, output_len=1) for request in requests]


def synthetic_rows(num_requests: int, seed: int = 0) -> Iterator[mooncake.Row]:
    """Conversations over one system prompt: each turn repeats the turns before it and adds to them.

    Turns come in random order, 12 or so at a time every 3 s; lengths are log-normal, like those of people.
    """
    rng = random.Random(seed)
    ids = itertools.count(1)
    conversations: list[list[int]] = []
    for number in range(num_requests):
        is_new = not conversations or rng.random() < 0.4
        blocks = [0] if is_new else conversations.pop(max(rng.randrange(-200, 0), -len(conversations)))
        blocks = [*blocks, *itertools.islice(ids, 1 + int(rng.lognormvariate(2.0, 0.8)))]
        conversations.append(blocks[:-1])  # the last block is not full, so that the next turn changes it
        yield {
            "timestamp": number // 12 * 3000,
            "input_length": BLOCK_TOKENS * (len(blocks) - 1) + rng.randrange(1, BLOCK_TOKENS),
            "output_length": 1 + int(rng.lognormvariate(5.5, 0.8)),
            "hash_ids": blocks,
        }


def traced(arrival_s: float, block_ids: Sequence[int], prompt_len: int, output_len: int) -> TracedRequest:
    blocks = names_of(np.array(block_ids, np.uint64))
    return TracedRequest(arrival_s, prompt_len, max(1, output_len), blocks, blocks.tolist())


def _traced(each: Call) -> TracedRequest:
    return TracedRequest(each.arrival_s, each.prompt_len, each.output_len, each.blocks, each.blocks.tolist())
