"""Mooncake's format, in which traces are kept: one JSON object a line, in the order of arrival.

A row has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each block of 512 prompt tokens.
Ours may also have `tenant`, `tier`, `session`, the `tool` that the output calls, and `gap` (ms): such a call comes so
long after the end of its session's call before it, whatever its timestamp. Stamps that are whole numbers lie on a
coarse grid, as Mooncake's do: calls of one instant are spread evenly up to the next one, since no user waits for a
round second. Stamps with a fraction are exact, and so are those that we write.
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from diptych.common.arrays import U64
from diptych.common.errors import ConfigError
from diptych.simulator.traces.call import BLOCK_TOKENS, Call, names_of, numbers_of
from diptych.simulator.traces.lines import json_objects, number_of, text_of

LABELS: Final = ("tenant", "tier", "session", "tool")
Row = Mapping[str, Any]


def read(lines: Iterable[str]) -> list[Call]:
    """Return the calls of a file. Raises `ConfigError` that names the line."""
    return calls_of(json_objects(lines))


def calls_of(rows: Iterable[Row]) -> list[Call]:
    """Return the calls of rows that are in the order of their timestamps."""
    numbered = list(enumerate(rows, 1))
    by_stamp = [list(group) for _, group in itertools.groupby(numbered, key=_stamp)]
    stamps = [_stamp(group[0]) for group in by_stamp]
    slots = [later - stamp for stamp, later in itertools.pairwise(stamps)] + [0.0]
    return [
        _call(line, row, _seconds(stamp + slot * index / len(group) if isinstance(stamp, int) else stamp))
        for group, stamp, slot in zip(by_stamp, stamps, slots, strict=True)
        for index, (line, row) in enumerate(group)
    ]


def write(calls: Iterable[Call]) -> Iterator[str]:
    """Yield the lines of a file that `read` makes the same calls of, if these came at whole microseconds."""
    for call in calls:
        labels = {name: value for name in LABELS if (value := getattr(call, name))}
        numbers = numbers_of(call.blocks).tolist()
        row = {"timestamp": round(1000 * call.arrival_s, 3), "input_length": call.prompt_len}
        gap = {} if math.isnan(call.gap_s) else {"gap": round(1000 * call.gap_s, 3)}
        yield json.dumps({**row, "output_length": call.output_len, "hash_ids": numbers, **labels, **gap}) + "\n"


def _stamp(numbered: tuple[int, Row]) -> int | float:
    line, row = numbered
    stamp = number_of(row, "timestamp", line)
    return stamp if isinstance(row["timestamp"], float) else int(stamp)


def _seconds(milliseconds: float) -> float:
    return round(1000 * milliseconds) / 1_000_000


def _call(line: int, row: Row, arrival_s: float) -> Call:
    prompt_len, output_len = (int(number_of(row, name, line)) for name in ("input_length", "output_length"))
    blocks = _blocks(row.get("hash_ids"), line)
    if not 0 <= BLOCK_TOKENS * len(blocks) - prompt_len < BLOCK_TOKENS:
        words = f"line {line}: a prompt of {prompt_len} tokens has {-(-prompt_len // BLOCK_TOKENS)} blocks of"
        raise ConfigError(f"{words} {BLOCK_TOKENS} tokens, but hash_ids names {len(blocks)}")
    labels = {name: text_of(row, name) for name in LABELS}
    gap_s = _seconds(number_of(row, "gap", line)) if "gap" in row else math.nan
    return Call(arrival_s, prompt_len, max(1, output_len), names_of(blocks), gap_s=gap_s, **labels)


def _blocks(found: object, line: int) -> U64:
    try:
        if isinstance(found, Sequence) and not isinstance(found, str):
            return np.array(found, np.uint64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"line {line}: hash_ids must be a list of whole numbers, one for each block of 512 prompt tokens")
