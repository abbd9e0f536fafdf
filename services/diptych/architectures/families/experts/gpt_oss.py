"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamped activation.

A checkpoint keeps all experts of a layer in one tensor, gates and ups in turns. In floats an expert's matrix lies in it
transposed; of MXFP4, whose scheme puts blocks and scales together, the experts come on top of each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ClampedSwiglu, ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Named, Piece, Placed, Split
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

STACKED: Final = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<name>gate_up|down)_proj(?P<bias>_bias)?")


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",)})
    hf.ignore("experts_per_token", "initial_context_length")  # said again under other names
    if not hf.rope_parameters:
        raise ConfigError(f"{hf.model_id}: config.json has no rope_parameters, of which gpt-oss has no one kind")
    config = hf.shared("gpt_oss", theta=150_000.0)
    has_biases = hf.get("attention_bias", True)
    return replace(
        config,
        qkv_bias=has_biases,
        o_bias=has_biases,
        sinks=True,
        windows=hf.windows(hf.get("sliding_window"), range(0, config.num_layers, 2)),
        activation=ClampedSwiglu(alpha=hf.get("swiglu_alpha", 1.702), limit=hf.get("swiglu_limit", 7.0)),
        moe=Moe(
            num_experts=hf["num_local_experts"],
            experts_per_token=hf["num_experts_per_tok"],
            ffn_size=config.ffn_size,
            normalize=True,
            router_bias=True,
            expert_bias=True,
        ),
    )


def _placement(config: ModelConfig) -> Iterator[Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        sinks = Piece(f"{layer}.sinks", 0, (config.num_heads,), Split.ROWS, wide=True)
        yield f"model.layers.{layer}.self_attn.sinks", (sinks,)
        yield from _experts(config, layer)


def _experts(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.moe is not None
    prefix, num_experts, ffn_size = f"model.layers.{layer}.mlp.", config.moe.num_experts, config.moe.ffn_size
    yield placement.whole(f"{prefix}router.weight", f"{layer}.router", (num_experts, config.hidden_size))
    yield placement.whole(f"{prefix}router.bias", f"{layer}.router_bias", (num_experts,))
    for i in range(num_experts):
        name, target = f"{prefix}experts.{i}.", f"{layer}.experts.{i}."
        yield from placement.feed_forward(name, target, config.hidden_size, ffn_size, placement.EXPERT_NAMES)
        for part, start in (("gate", 0), ("up", ffn_size)):
            yield f"{name}{part}_proj.bias", (Piece(f"{target}gate_up_bias", start, (ffn_size,), Split.ROWS),)
        yield placement.whole(f"{name}down_proj.bias", f"{target}down_bias", (config.hidden_size,))


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield the gates, ups and downs of each expert, or their biases; other tensors as they are."""
    name, tensor = named
    match = STACKED.fullmatch(name)
    if match is None:
        yield named
        return
    kind = "bias" if match["bias"] else "weight"
    for i, expert in enumerate(_by_expert(config, name, tensor, is_bias=bool(match["bias"]))):
        prefix = f"{match['block']}{i}."
        if match["name"] == "down":
            yield f"{prefix}down_proj.{kind}", expert
        else:
            yield f"{prefix}gate_proj.{kind}", _rows(expert, slice(0, None, 2))
            yield f"{prefix}up_proj.{kind}", _rows(expert, slice(1, None, 2))


def _by_expert(
    config: ModelConfig, name: str, tensor: Array | QuantizedArray, *, is_bias: bool
) -> Iterator[Array | QuantizedArray]:
    """Yield what each expert has, rows first: views of the tensor."""
    assert config.moe is not None
    num_experts = config.moe.num_experts
    if isinstance(tensor, QuantizedArray):
        size = len(tensor) // num_experts
        yield from (tensor.rows(slice(i * size, (i + 1) * size)) for i in range(num_experts))
        return
    if tensor.ndim != (2 if is_bias else 3) or len(tensor) != num_experts:
        raise ConfigError(f"{config.model_id}: {name} is {tensor.shape}, not the tensors of {num_experts} experts")
    yield from (each if is_bias else each.T for each in tensor)


def _rows(expert: Array | QuantizedArray, rows: slice) -> Array | QuantizedArray:
    return expert.rows(rows) if isinstance(expert, QuantizedArray) else expert[rows]


GPT_OSS = Family("GptOssForCausalLM", _read, _placement, unstack=_unstack)
