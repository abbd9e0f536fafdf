"""Gemma 3, text only: Gemma 2 with normed queries and keys, and another rotary embedding where a window slides."""

from __future__ import annotations

from dataclasses import replace

from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.hf_config import HfConfig
from diptych.engine.models.families.gemma2 import gemma, gemma_placement
from diptych.engine.models.family import Family


def _read(hf: HfConfig) -> ModelConfig:
    config = gemma(hf, hf.shared("gemma3", theta=1_000_000.0, tied=True))
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    local = [layer for layer in range(config.num_layers) if (layer + 1) % period]
    local_rope = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = hf.get("rope_local_base_freq") or 10_000.0
    return replace(
        config,
        qk_norm=True,
        windows=hf.windows(hf.get("sliding_window", 4096), local),
        local_rope=hf.rope({"rope_theta": theta, **local_rope}, config.head_dim, theta),
        attention_softcap=hf.get("attn_logit_softcapping") or 0.0,
        logits_softcap=hf.get("final_logit_softcapping") or 0.0,
    )


GEMMA3 = Family("Gemma3ForCausalLM", _read, gemma_placement)
