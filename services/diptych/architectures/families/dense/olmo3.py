"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which rotate as before texts were stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.olmo2 import olmo_placement, read_olmo
from diptych.architectures.hf_config import HfConfig

THETA: Final = 500_000.0


def _read(hf: HfConfig) -> ModelConfig:
    config = read_olmo(hf, "olmo3", THETA)
    local = [layer for layer in range(config.num_layers) if (layer + 1) % 4]
    local_rope = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = hf.get("rope_theta") or THETA
    return replace(
        config,
        windows=hf.windows(hf.get("sliding_window", 4096), local),
        local_rope=hf.rope({"rope_theta": theta, **local_rope}, config.head_dim, theta),
    )


OLMO3 = placement.Family("Olmo3ForCausalLM", _read, olmo_placement)
