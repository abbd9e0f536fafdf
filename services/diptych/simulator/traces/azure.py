"""Azure's traces of LLM inference, of 2023 and 2024: arrival, context tokens and generated tokens, as CSV.

They say nothing of prefixes, so that no two prompts share a block.
https://github.com/Azure/AzurePublicDataset (CC-BY; cite Splitwise, ISCA 2024)
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.columns import unshared
from diptych.simulator.traces.lines import number_of

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(lines: Iterable[str]) -> list[Call]:
    """Return the calls of a file, of which the first comes at 0. Raises `ConfigError` that names the line."""
    rows = csv.DictReader(lines)
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise ConfigError(f"the first line lacks the column {missing[0]}: it must name {', '.join(COLUMNS)}")
    found = [_row(row, line) for line, row in enumerate(rows, 2)]
    if not found:
        raise ConfigError("there is no call in it, only the names of columns")
    stamps_s, prompt_lens, output_lens = (np.array(column) for column in zip(*found, strict=True))
    return unshared(stamps_s - stamps_s.min(), np.maximum(1, prompt_lens), output_lens)


def _row(row: Mapping[str, str], line: int) -> tuple[float, int, int]:
    try:
        stamp = datetime.fromisoformat(row["TIMESTAMP"])
    except (TypeError, ValueError):
        raise ConfigError(f"line {line}: TIMESTAMP must be a date and a time, not {row['TIMESTAMP']!r}") from None
    stamp_s = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
    return stamp_s, int(number_of(row, "ContextTokens", line)), int(number_of(row, "GeneratedTokens", line))
