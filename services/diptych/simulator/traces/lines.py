"""Reads the lines of trace files, and says of a wrong one where it is and what it lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diptych.common.errors import ConfigError


def json_objects(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the object of each line that is not blank. Raises `ConfigError` for a line that is none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"line {number} must be a JSON object, as {{...}}")
        yield found


def number_of(row: Mapping[str, Any], name: str, line: int) -> float:
    """Return a field that is 0 or more. Raises `ConfigError` if it is not."""
    found = row.get(name)
    try:
        value = float(found)  # type: ignore[arg-type]  # None and lists raise
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"line {line}: {name} must be a number, 0 or more, not {found!r}")
    return value


def text_of(row: Mapping[str, Any], name: str) -> str:
    """Return a field that may be absent."""
    return str(row.get(name) or "")
