"""What an operator declares is to be so, as values: adapters on all workers, weights of pools, the level of logs. Pure.

    log_level = "info"

    [adapters]                    # by the name that clients use
    sql = "/models/adapters/sql"  # a PEFT folder, on each worker's machine

    [pools]                       # by their `--pool`: parts of the requests that name none
    default = 95
    next = 5                      # 0: only requests that name it

It is a whole: an adapter or pool that is left out is none that is declared. Only the level of logs stays as it is.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.common.logging import LEVELS

MAX_POOLS: Final = 64
MAX_ADAPTERS: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Declaration:
    """All of it."""

    adapters: Mapping[str, str] = field(default_factory=dict)  # paths by name
    pools: Mapping[str, float] = field(default_factory=dict)  # weights by name; none: pools are all the same
    log_level: str = ""  # empty: as it is


def parse_declaration(text: str, source: str) -> Declaration:
    """Read the TOML. Raises `ConfigError`, which names `source` and says what to change."""
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML: {error}") from None
    if unknown := entries.keys() - {"adapters", "pools", "log_level"}:
        raise ConfigError(f"{source}: unknown: {', '.join(sorted(unknown))}; there is adapters, pools, log_level")
    level = entries.get("log_level", "")
    if level not in ("", *LEVELS):
        raise ConfigError(f"{source}: log_level is one of {', '.join(LEVELS)}, not {level!r}")
    adapters = _entries(entries, "adapters", source, MAX_ADAPTERS)
    for name, path in adapters.items():
        if not (isinstance(path, str) and path):
            raise ConfigError(f"{source}: adapters.{name} is the path of a folder, not {path!r}")
    return Declaration(adapters, _weights(_entries(entries, "pools", source, MAX_POOLS), source), level)


def _entries(entries: Mapping[str, Any], part: str, source: str, most: int) -> Mapping[str, Any]:
    found = entries.get(part, _EMPTY)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{source}: [{part}] is a table of names")
    if len(found) > most:
        raise ConfigError(f"{source}: [{part}] has {len(found)} entries; it takes {most}")
    for name in found:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{source}: [{part}]: {name!r}: a name takes up to 128 of A-Z a-z 0-9 . _ : / -")
    return found


def _weights(pools: Mapping[str, Any], source: str) -> Mapping[str, float]:
    for name, weight in pools.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{source}: pools.{name} is a weight from 0 on, not {weight!r}")
    if pools and not any(pools.values()):
        raise ConfigError(f"{source}: [pools]: one weight at least is above 0, or nothing is served")
    return {name: float(weight) for name, weight in pools.items()}


def changes(before: Declaration, after: Declaration) -> list[str]:
    """Return in words what is different; nothing if all is the same."""
    words = []
    for name in sorted(before.adapters.keys() | after.adapters.keys()):
        old, new = before.adapters.get(name), after.adapters.get(name)
        if old != new:
            words.append(f"adapter {name}: {_from_to(old, new)}")
    if before.pools != after.pools:
        for name in sorted(before.pools.keys() | after.pools.keys()):
            old_weight, new_weight = before.pools.get(name), after.pools.get(name)
            if old_weight != new_weight:
                words.append(f"pool {name}: weight {_from_to(_number(old_weight), _number(new_weight))}")
    if after.log_level and before.log_level != after.log_level:
        words.append(f"log level: {_from_to(before.log_level or None, after.log_level)}")
    return words


def _number(weight: float | None) -> str | None:
    return None if weight is None else f"{weight:g}"


def _from_to(old: str | None, new: str | None) -> str:
    if new is None:
        return f"{old} is withdrawn"
    return new if old is None else f"{old} -> {new}"
