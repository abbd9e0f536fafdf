"""The configuration of a Llama that is as small as can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from diptych.architectures.config import ModelConfig, Rope

_TINY: Final = ModelConfig(
    model_id="tiny",
    architecture="llama",
    vocab_size=5,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=32,
    rms_norm_eps=1e-5,
    rope=Rope(1e4, 16),
    context_len=64,
    tie_embeddings=True,
    bos_id=None,
    eos_ids=(),
)


def tiny_config(**changes: Any) -> ModelConfig:
    return replace(_TINY, **changes)
