"""Nemotron 3 and 4, Minitron: norms that subtract the mean, networks without gates, half of each head rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Placed, Split, whole


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)})
    config = hf.part(_named(hf), lambda part: part.shared("nemotron", partial_rotary_factor=0.5))
    return replace(config, activation="relu_squared", centred_norms=True, norm_offset=1.0)


def _named(hf: HfConfig) -> Mapping[str, Any]:
    """Return all that is said, the norms' eps under its usual name."""
    known = ("hidden_act", "attention_bias", "mlp_bias", "norm_eps", "quantization_config")
    said = {key: hf[key] for key in hf}
    return {key: value for key, value in said.items() if key not in known} | {"rms_norm_eps": hf["norm_eps"]}


def _placement(config: ModelConfig) -> Iterator[Placed]:
    hidden, ffn = config.hidden_size, config.ffn_size
    yield from placement.embeddings(config)
    yield whole("model.norm.bias", "norm_bias", (hidden,))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield from placement.norms(config, layer)
        yield whole(f"{prefix}input_layernorm.bias", f"{layer}.input_norm_bias", (hidden,))
        yield whole(f"{prefix}post_attention_layernorm.bias", f"{layer}.ffn_norm_bias", (hidden,))
        yield from placement.attention(config, layer)
        yield whole(f"{prefix}mlp.up_proj.weight", f"{layer}.gate_up", (ffn, hidden), Split.ROWS)
        yield whole(f"{prefix}mlp.down_proj.weight", f"{layer}.down", (hidden, ffn), Split.COLUMNS)


NEMOTRON = Family("NemotronForCausalLM", _read, _placement)
