"""What the tensors of the layer that predicts one token more are called, as published checkpoints have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import next_layer, placement_of
from diptych.architectures.recurrent import DeltaNet, Recurrent
from diptych.architectures.registry import FAMILIES

QWEN3_5 = (  # of models without experts
    "mtp.fc.weight",
    "mtp.norm.weight",
    *(f"mtp.pre_fc_norm_{name}.weight" for name in ("embedding", "hidden")),
    *(f"mtp.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"mtp.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"mtp.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    "mtp.layers.0.self_attn.gate_proj.weight",  # once it is taken out of the queries' tensor
)


def hybrid(architecture: str) -> ModelConfig:
    config = tiny_config(recurrent=Recurrent((0,), DeltaNet(2, 4, 8, 12, 4)))
    own: dict[str, Any] = {"qk_norm": "heads", "norm_offset": 1.0, "attention_gate": True, "num_next_layers": 1}
    return replace(config, architecture=architecture, **own)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_5"])
def test_all_that_the_layer_needs_is_found_and_nothing_else(architecture: str) -> None:
    config = hybrid(architecture)
    name_of = FAMILIES[architecture].next_name
    assert name_of is not None
    layer = next_layer(config)
    wanted = {name for name, _ in placement_of(layer)(layer)}
    assert {name_of(config, name) for name in QWEN3_5} == wanted
    for name in ("model.layers.0.input_layernorm.weight", "mtp.embed_tokens.weight", "mtp.layers.1.mlp.up_proj.weight"):
        assert name_of(config, name) is None


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "deepseek_v3"])
def test_of_several_layers_each_for_its_own_distance_the_first_is_read(architecture: str) -> None:
    config = replace(hybrid(architecture), num_next_layers=3)
    assert next_layer(config) == next_layer(replace(config, num_next_layers=1))
    family = FAMILIES[architecture]
    assert family.next_name is not None
    later = ["mtp.layers.1.mlp.up_proj.weight", f"model.layers.{config.num_layers + 2}.mlp.up_proj.weight"]
    assert [family.next_name(config, name) for name in later] == [None, None]
    assert any(later[architecture == "deepseek_v3"].startswith(prefix) for prefix in family.not_read(config))
