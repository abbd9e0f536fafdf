"""Few model families that together have whatever a layer of any family has, for what is true of layers of each kind.

With `DIPTYCH_DEEP_CHECKS` all families are tried. `tests/engine/runner/test_families.py` compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Final

import pytest

from diptych.architectures.config import ModelConfig

FAMILIES: Final = (
    *("llama", "gpt oss", "llama 4", "granite", "gemma2", "gemma3 with images", "nemotron", "exaone4"),
    "gemma4, borrowed keys, wide networks, inputs of each layer",
    "gemma4, experts beside a network",
    "mistral large 4 with images, layers that share a choice, or latents, or both; groups",
    *("qwen3 next", "kimi linear", "lfm2, biases, another size of networks, not tied"),
    "nemotron h, latent experts in groups, long steps, a convolution without bias",
)


def of_each_kind(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test run with a model of each of `FAMILIES`, its `family_model`."""
    return test if os.environ.get("DIPTYCH_DEEP_CHECKS") else _of_few(test)


_of_few = pytest.mark.parametrize("family_model", FAMILIES, indirect=True)


def traits(config: ModelConfig) -> set[str]:
    """Return in which respects a model is not as Llama is: names of fields, of its parts and of theirs."""
    parts = (config.moe, config.latent, config.indexer, config.recurrent and config.recurrent.mixer)
    return _set_fields(config).union(*(_of_part(part) for part in parts if part is not None))


def _of_part(part: Any) -> set[str]:
    name = type(part).__name__
    return {name} | {f"{name}.{field}" for field in _set_fields(part)}


def _set_fields(value: Any) -> set[str]:
    return {
        field.name
        for field in fields(value)
        if field.default is not MISSING and getattr(value, field.name) != field.default
    }
