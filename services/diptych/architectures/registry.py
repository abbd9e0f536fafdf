"""Finds the family of a model by its architecture's name. Needs no torch: a router reads configurations, too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Placed, head
from diptych.architectures.pooling import Pooling, of_architecture
from diptych.architectures.shape_check import check_shapes
from diptych.common.errors import ConfigError

# model_type -> the module that holds its family, under the same name in capitals
HOMES: Final[Mapping[str, str]] = {
    "bert": "encoders.bert",
    "deepseek_v3": "latent.deepseek_v3",
    "deepseek_v32": "latent.deepseek_v32",
    "ernie4_5": "dense.ernie4_5",
    "ernie4_5_moe": "experts.ernie4_5_moe",
    "exaone4": "dense.exaone4",
    "gemma2": "dense.gemma2",
    "gemma3": "dense.gemma3",
    "gemma3_text": "dense.gemma3",
    "gemma4": "experts.gemma4",
    "gemma4_text": "experts.gemma4",
    "glm4": "dense.glm4",
    "glm4_moe": "experts.glm4_moe",
    "glm4_moe_lite": "latent.glm4_moe_lite",
    "glm_moe_dsa": "latent.glm_moe_dsa",
    "gpt_oss": "experts.gpt_oss",
    "granite": "dense.granite",
    "kimi_k25": "latent.kimi_k25",
    "kimi_linear": "recurrent.kimi_linear",
    "lfm2": "recurrent.lfm2",
    "lfm2_moe": "recurrent.lfm2",
    "llama": "dense.llama",
    "llama4": "experts.llama4",
    "llama4_text": "experts.llama4",
    "minimax_m2": "experts.minimax_m2",
    "ministral": "dense.ministral",
    "ministral3": "dense.ministral3",
    "mistral": "dense.mistral",
    "mistral3": "latent.mistral3",
    "mistral4": "latent.mistral4",
    "mistral_large4": "latent.mistral_large4",
    "mixtral": "experts.mixtral",
    "modernbert": "encoders.modernbert",
    "nemotron": "dense.nemotron",
    "nemotron_h": "recurrent.nemotron_h",
    "olmo2": "dense.olmo2",
    "olmo3": "dense.olmo3",
    "phi3": "dense.phi3",
    "qwen2": "dense.qwen2",
    "qwen2_5_vl": "dense.qwen2_5_vl",
    "qwen2_moe": "experts.qwen2_moe",
    "qwen3": "dense.qwen3",
    "qwen3_5": "recurrent.qwen3_5",
    "qwen3_5_moe": "recurrent.qwen3_5_moe",
    "qwen3_5_moe_text": "recurrent.qwen3_5_moe",
    "qwen3_5_text": "recurrent.qwen3_5",
    "qwen3_moe": "experts.qwen3_moe",
    "qwen3_next": "recurrent.qwen3_next",
    "qwen3_vl": "dense.qwen3_vl",
    "roberta": "encoders.bert",
    "seed_oss": "dense.seed_oss",
    "xlm_roberta": "encoders.bert",
}
# architectures that are known and not served, and what of them no layer computes
UNKNOWN: Final[dict[str, str]] = {
    "DeepseekV4ForCausalLM": "pages of compressed entries, hyper-connections, and experts that a token's id decides",
    "Glm5NextForConditionalGeneration": "hyper-connections, and an indexer that chooses groups of tokens",
    "MiniMaxM3SparseForConditionalGeneration": "blocks of keys and values that an indexer chooses for each KV head",
    "MiniMaxM3VLForCausalLM": "blocks of keys and values that an indexer chooses for each KV head",
    "Qwen4ExpForCausalLM": "hyper-connections, embeddings of several tokens, and an indexer that chooses blocks",
    "Qwen4ExpForConditionalGeneration": "hyper-connections, embeddings of several tokens, and an indexer of blocks",
}
HEADS: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # of EAGLE-3, that guess for a model
TEXT: Final = "ForCausalLM"  # the end of an architecture's name that makes text
POOLED: Final = ("ForSequenceClassification", "ForRewardModel", "Model")  # and of the same without
# what reading a value of another kind than expected runs into
NONSENSE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Families(Mapping[str, Family]):
    """All families by model_type. Each is imported when it is asked for: a process serves one model."""

    def __getitem__(self, name: str) -> Family:
        module = importlib.import_module(f"diptych.architectures.families.{HOMES[name]}")
        family: Family = getattr(module, name.upper())
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(HOMES)

    def __len__(self) -> int:
        return len(HOMES)


FAMILIES: Final = Families()


def from_hf(values: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    """Read a `config.json` and a `generation_config.json`. Raises `ConfigError` for what is not supported."""
    hf = HfConfig(values, generation, model_id)
    hf.ignore("quantization_config")  # it is about files, not about the model
    try:
        config = _family(hf).read(hf)
        config = config if config.pooling is not None else pooled(config, _pooling(hf))
        check_shapes(config)
    except KeyError as error:
        raise ConfigError(f"{model_id}: the configuration has no {error}") from None
    except NONSENSE as error:
        raise ConfigError(f"{model_id}: the configuration makes no sense: {error}") from None
    hf.log_unknown()
    return config


def pooled(config: ModelConfig, pooling: Pooling | None) -> ModelConfig:
    """Return a model that makes a vector of a prompt in place of text; None: as it is."""
    if pooling is None:
        return config
    sees_all = pooling.sees_all or (config.pooling is not None and config.pooling.sees_all)
    pooling = replace(pooling, sees_all=sees_all)
    return replace(config, pooling=pooling, tie_embeddings=True, keeps_all=config.keeps_all or sees_all)


def placement_of(config: ModelConfig) -> Iterator[Placed]:
    """Yield where the tensors of a checkpoint go."""
    own = FAMILIES[config.architecture].placement(config)
    return own if config.pooling is None else chain(own, head(config.pooling))


def _family(hf: HfConfig) -> Family:
    names, model_type = [*map(_making_text, hf.get("architectures") or ())], hf.get("model_type")
    if not names and model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    likely_first = sorted(FAMILIES, key=lambda name: name != model_type)  # so that the others are seldom imported
    for family in map(FAMILIES.__getitem__, likely_first):
        if {family.architecture, *family.aliases} & {*names}:
            return family
    for name in filter(UNKNOWN.__contains__, names):
        raise ConfigError(f"{hf.model_id}: architecture {name} is not supported: no layer computes {UNKNOWN[name]}")
    if any(name in HEADS for name in names):
        raise ConfigError(f"{hf.model_id} is no model: it guesses for one, which takes it by --speculate eagle:PATH")
    given = ", ".join(names) or f"of model_type {model_type}"
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ConfigError(f"{hf.model_id}: architecture {given} is not supported; {known} are")


def _pooling(hf: HfConfig) -> Pooling | None:
    """Return what a decoder makes of prompts in place of text, whose tokens may see those behind them; None: text."""
    pooling, sees_all = of_architecture(hf), hf.get("use_bidirectional_attention") is True
    if pooling is None and sees_all:
        raise ConfigError(f"{hf.model_id}: with use_bidirectional_attention=True no text can be made")
    return None if pooling is None else replace(pooling, sees_all=sees_all)


def _making_text(name: str) -> str:
    """Return what an architecture is called that makes text with the same layers."""
    end = next((end for end in POOLED if name.endswith(end)), "")
    known = f"{name.removesuffix(end).removesuffix('Text')}{TEXT}"
    return known if end and any(known in (each.architecture, *each.aliases) for each in FAMILIES.values()) else name
