"""Qwen3-VL: Qwen 3 that rotates by three axes in turns, and a tower with learned positions.

Rows of some of the tower's layers are added to what the first layers of the text return, in an image's places
(DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.qwen2_5_vl import (
    TOKEN_KEYS,
    VISION_KEYS,
    check_tower,
    read_text,
    renamed,
    text_placement,
)
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Placed
from diptych.architectures.tower import Tower
from diptych.architectures.tower_placement import qwen3_tower
from diptych.architectures.vision import qwen_input
from diptych.common.errors import ConfigError


def _read(hf: HfConfig) -> ModelConfig:
    hf.ignore(*VISION_KEYS, *TOKEN_KEYS)
    tower = _read_tower(hf)
    config, sections = read_text(hf, _read_text, takes_turns=True)
    tower.validate(config.hidden_size)
    if len(tower.taps) >= config.num_layers:
        raise ConfigError(f"{hf.model_id}: the text has {config.num_layers} layers, too few for {len(tower.taps)} taps")
    return replace(config, tower=tower, mrope=sections, vision=qwen_input(hf, hf["vision_config"], {}))


def _read_text(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    return replace(hf.shared("qwen3_vl", theta=500_000.0), qk_norm="heads")


def _read_tower(hf: HfConfig) -> Tower:
    said: Mapping[str, Any] = hf["vision_config"]
    check_tower(said, hf.model_id)
    if said.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ConfigError(f"{hf.model_id}: hidden_act={said['hidden_act']!r} of vision_config is not supported")
    return Tower(
        num_layers=said["depth"],
        hidden_size=said["hidden_size"],
        num_heads=said["num_heads"],
        ffn_size=said["intermediate_size"],
        out_size=said["out_hidden_size"],
        patch_size=said["patch_size"],
        merge_size=said["spatial_merge_size"],
        num_frames=said.get("temporal_patch_size", 2),
        activation="gelu_tanh",
        gated=False,
        num_positions=said["num_position_embeddings"],
        taps=tuple(said["deepstack_visual_indexes"]),
    )


def _place(config: ModelConfig) -> Iterator[Placed]:
    assert config.tower is not None
    yield from text_placement(config)
    yield from qwen3_tower(config.tower)


QWEN3_VL = placement.Family("Qwen3VLForConditionalGeneration", _read, _place, unstack=renamed)
