"""Reads the request log of routers (`--request-log`), so that yesterday's load can be simulated today.

Calls are as long as they were served. Prompts of which the router saw no tokens share nothing. Names of blocks become
numbers in the order of their coming, so a trace that is saved afterwards has no hash of anybody's prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from diptych.common.arrays import U64
from diptych.common.errors import ConfigError
from diptych.router.values.logged_request import LoggedRequest, logged_request, names_in
from diptych.simulator.traces.call import BLOCK_TOKENS, Call, names_of
from diptych.simulator.traces.lines import json_objects
from diptych.simulator.traces.measured import Measured


def read(lines: Iterable[str]) -> list[Call]:
    """Return the calls of one log or several, the first at 0. Raises `ConfigError` that names the line."""
    logged = _in_order(lines)
    known: dict[int, int] = {}
    sessions: dict[str, str] = {"": ""}
    return [
        Call(
            round(each.arrival - logged[0].arrival, 6),
            each.prompt_len,
            max(1, each.output_len),
            _numbered(each, known),
            tier=each.tier,
            session=sessions.setdefault(each.session, str(len(sessions))),
        )
        for each in logged
    ]


def measured_in(lines: Iterable[str]) -> Measured:
    """Return how the same calls were served. Raises `ConfigError` likewise."""
    logged = _in_order(lines)
    ttft_s, tpot_s = (np.array([getattr(each, name) for each in logged], float) for name in ("ttft_s", "tpot_s"))
    prompt_len, output_len, cached_len = (
        np.array([getattr(each, name) for each in logged]) for name in ("prompt_len", "output_len", "cached_len")
    )
    e2e_s = np.where(output_len > 1, ttft_s + tpot_s * (output_len - 1), ttft_s)
    return Measured(ttft_s, tpot_s, e2e_s, prompt_len, cached_len)


def _in_order(lines: Iterable[str]) -> list[LoggedRequest]:
    logged = [_logged(line, row) for line, row in enumerate(json_objects(lines), 1)]
    return sorted(logged, key=lambda each: each.arrival)


def _logged(line: int, row: Mapping[str, Any]) -> LoggedRequest:
    try:
        found = logged_request(dict(row))
        num_names, num_blocks = len(names_in(found.blocks)), -(-found.prompt_len // BLOCK_TOKENS)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"line {line} is none of a request log: {error}") from None
    if num_names not in (0, num_blocks) or found.prompt_len < 1:
        words = f"has {num_names} names of blocks for a prompt of {found.prompt_len} tokens"
        raise ConfigError(f"line {line} {words}: one for each {BLOCK_TOKENS} are needed, or none")
    return found


def _numbered(each: LoggedRequest, known: dict[int, int]) -> U64:
    """Return names that are made from numbers; blocks without a name get new ones."""
    num_blocks = -(-each.prompt_len // BLOCK_TOKENS)
    names = names_in(each.blocks).tolist() or range(-len(known) - 1, -len(known) - 1 - num_blocks, -1)
    return names_of(np.array([known.setdefault(name, len(known)) for name in names], np.int64))
