"""Reads the JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from diptych.common.errors import ConfigError

MAX_BYTES: Final = 64 << 20  # the largest known, indices of shards, take a sixth of it


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises `ConfigError` that names a missing or malformed file."""
    value = _read(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects of the list in a file. Raises `ConfigError` as `read_json` does."""
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{path} holds no JSON list of objects")
    return value


def _read(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
