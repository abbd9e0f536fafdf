"""Finds the family of a model by its architecture's name. Needs no torch: a router reads configurations, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.hf_config import HfConfig
from diptych.engine.models.families.llama import LLAMA
from diptych.engine.models.family import Family

FAMILIES: Final[dict[str, Family]] = {"llama": LLAMA}  # by the name in GGUF files, and in Hugging Face's model_type


def from_hf(values: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    """Read a `config.json` and a `generation_config.json`. Raises `ConfigError` for what is not supported."""
    hf = HfConfig(values, generation, model_id)
    hf.refuse_unless({"quantization_config": ()})
    family = _family(hf)
    try:
        config = family.read(hf)
    except KeyError as error:
        raise ConfigError(f"{model_id}: config.json has no {error}") from None
    config.validate()
    return config


def _family(hf: HfConfig) -> Family:
    names = hf.values.get("architectures") or [hf.values.get("model_type")]
    for family_name, family in FAMILIES.items():
        if family_name in names or any(name in family.architectures for name in names):
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.architectures)
    raise ConfigError(f"{hf.model_id}: architecture {', '.join(map(str, names))} is not supported; {known} are")
