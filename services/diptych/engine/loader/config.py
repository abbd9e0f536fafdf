"""What the engine must know of a model before it reads a weight, the same for every file format.

Rule: a feature that the model code does not compute is refused here by name; nothing is silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model."""

    model_id: str  # the name that clients ask for
    architecture: str  # "llama"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    rope_theta: float
    context_len: int  # tokens
    tie_embeddings: bool  # the output projection is the input embedding
    bos_id: int | None
    eos_ids: tuple[int, ...]
    rope_divisors: tuple[float, ...] = ()  # [head_dim / 2]: each rotary frequency is divided by its own; empty: by 1

    def validate(self) -> None:
        """Raise `ConfigError` for shapes that no attention can have."""
        sizes = (self.vocab_size, self.hidden_size, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(*sizes, self.ffn_size, self.context_len) < 1:
            raise ConfigError(f"{self.model_id}: every size must be at least 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.model_id}: {self.num_heads} heads do not share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2 or len(self.rope_divisors) not in (0, self.head_dim // 2):
            raise ConfigError(f"{self.model_id}: head_dim {self.head_dim} does not fit its rotary embedding")


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    """Read Hugging Face's `config.json` and `generation_config.json`."""
    _refuse_unsupported(config, model_id)
    try:
        return _read_hf(config, generation, model_id)
    except KeyError as error:
        raise ConfigError(f"{model_id}: config.json has no {error}") from None


def _read_hf(config: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> ModelConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return ModelConfig(
        model_id=model_id,
        architecture="llama",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        ffn_size=config["intermediate_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=rope_theta,
        context_len=config["max_position_embeddings"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        bos_id=config.get("bos_token_id"),
        eos_ids=_eos_ids(config, generation),
        rope_divisors=_rope_divisors(rope, rope_theta, head_dim, model_id),
    )


def _refuse_unsupported(config: Mapping[str, Any], model_id: str) -> None:
    architectures = config.get("architectures") or [config.get("model_type")]
    if "LlamaForCausalLM" not in architectures and config.get("model_type") != "llama":
        raise ConfigError(f"{model_id}: architecture {architectures} is not supported; Llama is")
    supported = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "quantization_config": ()}
    for key, values in supported.items():
        if config.get(key) is not None and config[key] not in values:
            raise ConfigError(f"{model_id}: {key}={config[key]!r} in config.json is not supported")


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int, model_id: str) -> tuple[float, ...]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return tuple(_llama3_divisor(rope, theta ** (2 * i / head_dim)) for i in range(head_dim // 2))
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
