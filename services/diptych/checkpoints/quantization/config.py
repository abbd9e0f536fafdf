"""Chooses the scheme that a checkpoint's `quantization_config` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from diptych.checkpoints.quantization.awq import awq
from diptych.checkpoints.quantization.compressed_tensors import compressed_tensors
from diptych.checkpoints.quantization.float8 import float8
from diptych.checkpoints.quantization.gptq import gptq
from diptych.checkpoints.quantization.scheme import Scheme
from diptych.common.errors import ConfigError

SCHEMES: Final[dict[str, Callable[[Mapping[str, Any]], Scheme]]] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": float8,
    "fbgemm_fp8": float8,
    "compressed-tensors": compressed_tensors,
}


def read_scheme(config: Mapping[str, Any], model_id: str) -> Scheme:
    """Read `quantization_config`. Raises `ConfigError` for what is not supported."""
    method = str(config.get("quant_method"))
    if method not in SCHEMES:
        raise ConfigError(f"{model_id}: quant_method {method!r} is not supported; {', '.join(SCHEMES)} are")
    try:
        return SCHEMES[method](config)
    except KeyError as error:
        raise ConfigError(f"{model_id}: quantization_config has no {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{model_id}: {error}") from None
