"""Finds the family of a model by its architecture's name. Needs no torch: a router reads configurations, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.hf_config import HfConfig
from diptych.engine.models.families.gemma2 import GEMMA2
from diptych.engine.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from diptych.engine.models.families.llama import LLAMA
from diptych.engine.models.families.mistral import MISTRAL
from diptych.engine.models.families.mixtral import MIXTRAL
from diptych.engine.models.families.phi3 import PHI3
from diptych.engine.models.families.qwen2 import QWEN2
from diptych.engine.models.families.qwen3 import QWEN3
from diptych.engine.models.families.qwen3_moe import QWEN3_MOE
from diptych.engine.models.family import Family

FAMILIES: Final[dict[str, Family]] = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3_TEXT,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}


def from_hf(values: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    """Read a `config.json` and a `generation_config.json`. Raises `ConfigError` for what is not supported."""
    hf = HfConfig(values, generation, model_id)
    hf.ignore("quantization_config")  # it is about files, not about the model
    family = _family(hf)
    try:
        config = family.read(hf)
    except KeyError as error:
        raise ConfigError(f"{model_id}: the configuration has no {error}") from None
    config.validate()
    hf.log_unknown()
    return config


def _family(hf: HfConfig) -> Family:
    names = hf.get("architectures") or ()
    for family in FAMILIES.values():
        if family.architecture in names:
            return family
    if not names and hf.get("model_type") in FAMILIES:
        return FAMILIES[hf["model_type"]]
    given = ", ".join(names) or f"of model_type {hf.get('model_type')}"
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ConfigError(f"{hf.model_id}: architecture {given} is not supported; {known} are")
