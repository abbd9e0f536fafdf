"""Reads the ways that published models stretch their rotary embedding over longer texts.

All are written as a divisor of each frequency and a scale of the result, as `Rope` holds them. They are the same for
every text: a key that is cached, or sent to another worker, was rotated once and for all.
Formulas: transformers' `modeling_rope_utils.py`, which names the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from diptych.architectures.config import Rope
from diptych.common.errors import ConfigError

Parameters = Mapping[str, Any]  # `rope_parameters` or `rope_scaling` of a `config.json`
ORIGINAL: Final = "original_max_position_embeddings"
COMMON_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


def read_rope(
    parameters: Parameters, *, theta: float, dim: int, context_len: int, original_len: int, model_id: str
) -> Rope:
    """Return the embedding of `dim` dimensions. `original_len`: of training, if `parameters` do not say another."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"{model_id}: rope scaling {kind!r} is not supported; {', '.join(KINDS)} are")
    read, keys = KINDS[kind]
    unknown = [key for key, value in parameters.items() if key not in COMMON_KEYS | keys and value is not None]
    if unknown:
        raise ConfigError(f"{model_id}: {', '.join(unknown)} of rope scaling {kind!r} is not supported")
    given = {key: value for key, value in parameters.items() if value is not None}
    return read({ORIGINAL: original_len, **given}, theta, dim, context_len)


def stretched_len(parameters: Parameters, context_len: int) -> int:
    """Return how long texts may be: with YaRN, `max_position_embeddings` may be the length before stretching."""
    if (parameters.get("rope_type") or parameters.get("type")) != "yarn":
        return context_len
    original = parameters.get(ORIGINAL) or context_len
    return max(context_len, int(original * parameters["factor"]))


def _plain(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim)


def _linear(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim, (float(parameters["factor"]),) * (dim // 2))


def _llama3(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim, tuple(_llama3_divisor(parameters, theta ** (2 * i / dim)) for i in range(dim // 2)))


def _llama3_divisor(parameters: Parameters, period: float) -> float:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = parameters[ORIGINAL] / (2 * math.pi * period)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], float(parameters["factor"])
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def _yarn(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    """YaRN: as `_llama3`, but the ramp between is over the dimensions, and scores grow."""
    factor, original = float(parameters["factor"]), parameters[ORIGINAL]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return Rope(theta, dim, tuple(1 / (each / factor + 1 - each) for each in ramp), _yarn_scale(parameters, factor))


def _yarn_scale(parameters: Parameters, factor: float) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dims:
        return _yarn_growth(factor, mscale) / _yarn_growth(factor, all_dims)
    return _yarn_growth(factor, 1.0)


def growth_of_all_dims(parameters: Parameters) -> float:
    """Return what queries and keys each grow by in models that scale those dimensions, too, that don't rotate."""
    all_dims = parameters.get("mscale_all_dim")
    return _yarn_growth(float(parameters["factor"]), all_dims) if all_dims else 1.0


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    """LongRoPE: a list of divisors for models served beyond their original length, and one for others.

    transformers changes lists when a text grows beyond the original length, and leaves cached keys as they are.
    """
    original = parameters[ORIGINAL]
    divisors = parameters["long_factor" if context_len > original else "short_factor"]
    scale, factor = parameters.get("attention_factor"), parameters.get("factor", context_len / original)
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(theta, dim, tuple(map(float, divisors)), float(scale))


Reader = Callable[[Parameters, float, int, int], Rope]
YARN_KEYS: Final = {"factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}
LONGROPE_KEYS: Final = {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"}
KINDS: Final[Mapping[str, tuple[Reader, set[str]]]] = {
    "default": (_plain, set()),
    "linear": (_linear, {"factor"}),
    "dynamic": (_plain, {"factor", ORIGINAL}),  # changes nothing up to `max_position_embeddings`, the longest we serve
    "llama3": (_llama3, {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "yarn": (_yarn, YARN_KEYS | {"truncate"}),
    "longrope": (_longrope, LONGROPE_KEYS),
    "su": (_longrope, LONGROPE_KEYS),  # its name in older files
}
