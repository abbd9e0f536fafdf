"""Reads the ways that published models stretch their rotary embedding over longer texts.

All are written as a divisor of each frequency and a scale of the result, as `Rope` holds them.
Formulas: transformers' `modeling_rope_utils.py`, which names the papers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import Rope


def read_rope(rope: Mapping[str, Any], *, theta: float, dim: int, model_id: str) -> Rope:
    """Read `rope_parameters` or `rope_scaling` of a `config.json`."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, (float(rope["factor"]),) * (dim // 2))
    if kind == "llama3":
        return Rope(theta, dim, tuple(_llama3_divisor(rope, theta ** (2 * i / dim)) for i in range(dim // 2)))
    raise ConfigError(f"{model_id}: rope scaling {kind!r} is not supported; default, linear and llama3 are")


def _llama3_divisor(rope: Mapping[str, Any], period: float) -> float:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi * period
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], float(rope["factor"])
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))
