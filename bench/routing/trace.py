"""Requests to replay: a trace in Mooncake's format, or a synthetic one with the same shape.

A row has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each block of 512 prompt tokens:
equal ids name equal prefixes. Traces stamp their requests on a coarse grid; those of one instant are spread evenly up
to the next one, since no user waits for a round second.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS: Final = 512
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # ids of a trace are small and dense; page hashes are not


@dataclass(frozen=True, slots=True, eq=False)
class TracedRequest:
    arrival_s: float
    prompt_len: int
    output_len: int
    blocks: NDArray[np.uint64]  # hashes of the prompt's blocks, the last of which need not be full
    block_list: Sequence[int]  # the same, for code that looks at them one by one

    @property
    def num_blocks(self) -> int:
        return len(self.block_list)


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Read a trace file, or its first `limit` requests."""
    with path.open(encoding="utf-8") as lines:
        return parse_rows(json.loads(line) for line in itertools.islice(lines, limit))


def parse_rows(rows: Iterable[Mapping[str, Any]]) -> list[TracedRequest]:
    """Make requests of rows, in the order of their timestamps."""
    by_stamp = [list(group) for _, group in itertools.groupby(rows, key=lambda row: int(row["timestamp"]))]
    stamps = [int(group[0]["timestamp"]) / 1000 for group in by_stamp]
    slots = [later - stamp for stamp, later in itertools.pairwise(stamps)] + [0.0]
    return [
        _request(row, stamp + slot * index / len(group))
        for group, stamp, slot in zip(by_stamp, stamps, slots, strict=True)
        for index, row in enumerate(group)
    ]


def whole_blocks(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """Let every prompt end with its last block and answer with one token, as replays that count blocks do."""
    return [replace(request, prompt_len=BLOCK_TOKENS * request.num_blocks, output_len=1) for request in requests]


def synthetic_rows(num_requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
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
    blocks = (np.array(block_ids, np.uint64) + np.uint64(1)) * _SPREAD
    return TracedRequest(arrival_s, prompt_len, max(1, output_len), blocks, blocks.tolist())


def _request(row: Mapping[str, Any], arrival_s: float) -> TracedRequest:
    return traced(arrival_s, row["hash_ids"], int(row["input_length"]), int(row["output_length"]))
