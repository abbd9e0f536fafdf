"""EXAONE 4: norms behind attention and feed-forward network, none before; each head is normed.

Larger models have a window in most layers, and those are all that rotate.
"""

from __future__ import annotations

from dataclasses import replace

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.olmo2 import olmo_placement
from diptych.architectures.hf_config import HfConfig


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    config, window = hf.shared("exaone4"), hf.get("sliding_window", 4096)
    windows = hf.windows(window, _local(hf, config.num_layers) if window else ())
    return replace(
        config,
        windows=windows,
        still_layers=frozenset(layer for layer, seen in enumerate(windows) if not seen),
        qk_norm="heads",
        pre_norms=False,
        post_norms=True,
    )


def _local(hf: HfConfig, num_layers: int) -> list[int]:
    """Return the layers with a window, unless they are listed. (Only then may the pattern be one of letters.)"""
    if hf.get("layer_types") is not None:
        hf.ignore("sliding_window_pattern")
        return []
    hf.refuse_unless({"sliding_window_pattern": range(1, 1 + num_layers)})
    every = hf.get("sliding_window_pattern", 4)
    return [layer for layer in range(num_layers) if (layer + 1) % every]


EXAONE4 = placement.Family("Exaone4ForCausalLM", _read, olmo_placement)
