"""Finds the family of a model by its architecture's name. Needs no torch: a router reads configurations, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.ernie4_5 import ERNIE4_5
from diptych.architectures.families.dense.gemma2 import GEMMA2
from diptych.architectures.families.dense.gemma3 import GEMMA3, GEMMA3_TEXT
from diptych.architectures.families.dense.glm4 import GLM4
from diptych.architectures.families.dense.granite import GRANITE
from diptych.architectures.families.dense.llama import LLAMA
from diptych.architectures.families.dense.ministral3 import MINISTRAL3
from diptych.architectures.families.dense.mistral import MISTRAL
from diptych.architectures.families.dense.nemotron import NEMOTRON
from diptych.architectures.families.dense.olmo2 import OLMO2
from diptych.architectures.families.dense.olmo3 import OLMO3
from diptych.architectures.families.dense.phi3 import PHI3
from diptych.architectures.families.dense.qwen2 import QWEN2
from diptych.architectures.families.dense.qwen3 import QWEN3
from diptych.architectures.families.dense.seed_oss import SEED_OSS
from diptych.architectures.families.experts.ernie4_5_moe import ERNIE4_5_MOE
from diptych.architectures.families.experts.gemma4 import GEMMA4, GEMMA4_TEXT
from diptych.architectures.families.experts.glm4_moe import GLM4_MOE
from diptych.architectures.families.experts.gpt_oss import GPT_OSS
from diptych.architectures.families.experts.llama4 import LLAMA4, LLAMA4_TEXT
from diptych.architectures.families.experts.minimax_m2 import MINIMAX_M2
from diptych.architectures.families.experts.mixtral import MIXTRAL
from diptych.architectures.families.experts.qwen2_moe import QWEN2_MOE
from diptych.architectures.families.experts.qwen3_moe import QWEN3_MOE
from diptych.architectures.families.latent.deepseek_v3 import DEEPSEEK_V3
from diptych.architectures.families.latent.deepseek_v32 import DEEPSEEK_V32
from diptych.architectures.families.latent.glm4_moe_lite import GLM4_MOE_LITE
from diptych.architectures.families.latent.glm_moe_dsa import GLM_MOE_DSA
from diptych.architectures.families.latent.kimi_k25 import KIMI_K25
from diptych.architectures.families.latent.mistral3 import MISTRAL3
from diptych.architectures.families.latent.mistral4 import MISTRAL4
from diptych.architectures.families.latent.mistral_large4 import MISTRAL_LARGE4
from diptych.architectures.families.recurrent.kimi_linear import KIMI_LINEAR
from diptych.architectures.families.recurrent.lfm2 import LFM2, LFM2_MOE
from diptych.architectures.families.recurrent.nemotron_h import NEMOTRON_H
from diptych.architectures.families.recurrent.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from diptych.architectures.families.recurrent.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from diptych.architectures.families.recurrent.qwen3_next import QWEN3_NEXT
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family
from diptych.common.errors import ConfigError

FAMILIES: Final[dict[str, Family]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3_TEXT,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4_TEXT,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "kimi_k25": KIMI_K25,
    "kimi_linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "llama": LLAMA,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4_TEXT,
    "minimax_m2": MINIMAX_M2,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mistral3": MISTRAL3,
    "mistral4": MISTRAL4,
    "mistral_large4": MISTRAL_LARGE4,
    "mixtral": MIXTRAL,
    "nemotron": NEMOTRON,
    "nemotron_h": NEMOTRON_H,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "seed_oss": SEED_OSS,
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
# what reading a value of another kind than expected runs into
NONSENSE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def from_hf(values: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    """Read a `config.json` and a `generation_config.json`. Raises `ConfigError` for what is not supported."""
    hf = HfConfig(values, generation, model_id)
    hf.ignore("quantization_config")  # it is about files, not about the model
    try:
        config = _family(hf).read(hf)
        config.validate()
    except KeyError as error:
        raise ConfigError(f"{model_id}: the configuration has no {error}") from None
    except NONSENSE as error:
        raise ConfigError(f"{model_id}: the configuration makes no sense: {error}") from None
    hf.log_unknown()
    return config


def _family(hf: HfConfig) -> Family:
    names = hf.get("architectures") or ()
    for family in FAMILIES.values():
        if {family.architecture, *family.aliases} & {*names}:
            return family
    if not names and hf.get("model_type") in FAMILIES:
        return FAMILIES[hf["model_type"]]
    for name in filter(UNKNOWN.__contains__, names):
        raise ConfigError(f"{hf.model_id}: architecture {name} is not supported: no layer computes {UNKNOWN[name]}")
    given = ", ".join(names) or f"of model_type {hf.get('model_type')}"
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ConfigError(f"{hf.model_id}: architecture {given} is not supported; {known} are")
