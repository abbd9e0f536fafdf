"""Reads Hugging Face's `config.json` and `generation_config.json`, as far as they mean the same for every family.

Rule: a feature that the model code does not compute is refused by name; nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.rope_scaling import read_rope


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The two files of a folder, and the name it is served under."""

    values: Mapping[str, Any]
    generation: Mapping[str, Any]
    model_id: str

    def refuse_unless(self, supported: Mapping[str, Collection[Any]]) -> None:
        """Raise `ConfigError` for a key that has a value other than those `supported`; a key may be absent."""
        for key, values in supported.items():
            if self.values.get(key) is not None and self.values[key] not in values:
                raise ConfigError(f"{self.model_id}: {key}={self.values[key]!r} in config.json is not supported")

    def shared(self, architecture: str) -> ModelConfig:
        """Return what the common keys say; the rest is as in Llama."""
        config = self.values
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return ModelConfig(
            model_id=self.model_id,
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            ffn_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=read_rope(rope, theta=theta, dim=head_dim, model_id=self.model_id),
            context_len=config["max_position_embeddings"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            bos_id=config.get("bos_token_id"),
            eos_ids=self._eos_ids(),
        )

    def _eos_ids(self) -> tuple[int, ...]:
        ids = self.generation.get("eos_token_id", self.values.get("eos_token_id"))
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
