"""Reads a trace in any format that is known, told by its first line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from diptych.common.errors import ConfigError
from diptych.simulator.traces import azure, mooncake, request_log
from diptych.simulator.traces.call import Call, from_zero
from diptych.simulator.traces.measured import Measured

FORMATS: Final = "rows with hash_ids (Mooncake's, or saved), Azure's CSV with TIMESTAMP, or a router's request log"


def read_calls(lines: Iterable[str]) -> list[Call]:
    """Return the calls of a file, in the order of their arrival. Raises `ConfigError` that says what is wrong where."""
    rest = iter(lines)
    first = next(rest, "").lstrip("\ufeff")
    whole = itertools.chain([first], rest)
    if not first:
        raise ConfigError("it is empty: nobody has written a call to it yet")
    if '"hash_ids"' in first:
        calls = mooncake.read(whole)
    elif '"log"' in first:
        calls = request_log.read(whole)
    elif first.startswith(azure.COLUMNS[0]):
        calls = azure.read(whole)
    else:
        raise ConfigError(f"its first line is that of no known format: {FORMATS}")
    return from_zero(sorted(calls, key=lambda call: call.arrival_s))


def measured_in(lines: Sequence[str]) -> Measured:
    """Return how the calls of a request log were served. Raises `ConfigError` for any other file: none says so."""
    if not lines or '"log"' not in lines[0]:
        raise ConfigError("only a router's request log says how its calls were served: give it as --trace")
    return request_log.measured_in(lines)


def at_rate(calls: Sequence[Call], rate: float) -> list[Call]:
    """Return the same calls, faster or slower, so that `rate` come a second in the mean.

    Raises `ConfigError` where all come at once.
    """
    span_s = calls[-1].arrival_s - calls[0].arrival_s if calls else 0.0
    if not span_s:
        raise ConfigError("its calls all come at once, so that no rate can be given to them")
    factor = len(calls) / (rate * span_s)
    return [replace(call, arrival_s=round(call.arrival_s * factor, 6)) for call in calls]
