"""Reads a GGUF file's metadata as the `config.json` it was made from; from there on a family is one thing.

Rule: a key of the architecture that has no place there is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.gguf import GgufFile
from diptych.engine.models.registry import from_hf
from diptych.engine.quantization.weight import as_floats

ROPE_DIVISORS: Final = "rope_freqs.weight"  # Llama 3.1's frequency scaling, as a tensor
ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
KEYS: Final = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
ROPE_KEYS: Final = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
}
IMPLIED: Final = {"attention.value_length", "rope.dimension_count", "rope.scaling.finetuned", "vocab_size"}


def read_config(file: GgufFile, model_id: str) -> ModelConfig:
    """Raise `ConfigError` for what is not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{model_id}: GGUF architecture {architecture!r} is not supported; {known} are")
    start = f"{architecture}."
    own = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    unknown = [key for key in own if key not in KEYS.keys() | ROPE_KEYS.keys() | IMPLIED]
    if unknown:
        raise ConfigError(f"{model_id}: {start}{unknown[0]} in the GGUF metadata is not supported")
    config = from_hf(_as_hf(own, file) | {"architectures": [ARCHITECTURES[architecture]]}, {}, model_id)
    if own.get("rope.dimension_count", config.rope.dim) != config.rope.dim:
        raise ConfigError(f"{model_id}: heads of {config.head_dim} of which fewer dimensions rotate are not supported")
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(as_floats(file.read(ROPE_DIVISORS)).tolist())
        return replace(config, rope=replace(config.rope, divisors=divisors))
    return config


def _as_hf(own: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    rope = {name: own[key] for key, name in ROPE_KEYS.items() if key in own}
    values = {name: own[key] for key, name in KEYS.items() if key in own}
    return values | {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rope_scaling": None if rope.get("rope_type") == "none" else rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
