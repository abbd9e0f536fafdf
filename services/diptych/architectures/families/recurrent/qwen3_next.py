"""Qwen3-Next: three of four layers are gated delta nets; the others' attention has gates and turns a part of a head.

A checkpoint keeps queries and gates of a head together, and what a delta net is given, by key heads. The layer that
predicts one token more attends, and is read where it guesses: see `next_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Named
from diptych.architectures.recurrent import DeltaNet, Recurrent
from diptych.common.arrays import I64
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

LINEAR: Final = "linear_attention"
LAYER_TYPES: Final = (LINEAR, "full_attention")
NEXT: Final = "mtp."
NOT_READ: Final = (NEXT,)  # what predicts more tokens than the next
NEXT_NAMES: Final = {  # as `next_layer` has them
    "fc.weight": "model.layers.0.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "model.layers.0.enorm.weight",
    "pre_fc_norm_hidden.weight": "model.layers.0.hnorm.weight",
}


def next_name(config: ModelConfig, name: str, prefix: str = "model.") -> str | None:
    """Return what a tensor of the layer behind the last one is called in a model of that layer alone; None: of others.

    `prefix`: of the names of a text's tensors.
    """
    own = name.removeprefix(NEXT)
    if own in NEXT_NAMES and own != name:
        return NEXT_NAMES[own]
    return f"{prefix}{own}" if own != name and own.startswith(("layers.0.", "norm.")) else None


def with_delta_nets(config: ModelConfig, hf: HfConfig) -> ModelConfig:
    """Return `config` with layers as Qwen3-Next and its successors have them."""
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    return replace(
        config,
        attention_gate=True,
        qk_norm="heads",
        norm_offset=1.0,
        recurrent=Recurrent(_linear_layers(hf, config.num_layers), _delta_net(hf)),
    )


def _linear_layers(hf: HfConfig, num_layers: int) -> tuple[int, ...]:
    interval = hf.get("full_attention_interval") or 4
    types = hf.get("layer_types") or [LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if len(types) != num_layers or set(types) - set(LAYER_TYPES):
        raise ConfigError(f"{hf.model_id}: layer_types must name {' or '.join(LAYER_TYPES)} for {num_layers} layers")
    if set(types) != set(LAYER_TYPES):
        raise ConfigError(f"{hf.model_id}: a model whose layers are all {types[0]} is not supported")
    return tuple(layer for layer, each in enumerate(types) if each == LINEAR)


def _delta_net(hf: HfConfig) -> DeltaNet:
    net = DeltaNet(
        num_key_heads=hf.get("linear_num_key_heads", 16),
        num_value_heads=hf.get("linear_num_value_heads", 32),
        key_dim=hf.get("linear_key_head_dim", 128),
        value_dim=hf.get("linear_value_head_dim", 128),
        conv_width=hf.get("linear_conv_kernel_dim", 4),
    )
    if min(net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim, net.conv_width - 1) < 1:
        raise ConfigError(
            f"{hf.model_id}: every size of a delta net must be at least 1, and its convolution's 2: {net}"
        )
    if net.num_value_heads % net.num_key_heads:
        raise ConfigError(
            f"{hf.model_id}: {net.num_value_heads} value heads do not share {net.num_key_heads} key heads evenly"
        )
    return net


def shared_moe(hf: HfConfig, dense_layers: frozenset[int]) -> Moe:
    """Read experts beside a gated one for every token."""
    return Moe(
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=hf["moe_intermediate_size"],
        normalize=hf.get("norm_topk_prob", True),
        dense_layers=dense_layers,
        shared_ffn_size=hf["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def delta_placement(config: ModelConfig) -> Iterator[placement.Placed]:
    """Yield where the tensors of such a model go, once `unstack` has taken apart what a checkpoint keeps together."""
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        if config.is_recurrent(layer):
            yield from placement.delta_net(config, layer)
        else:
            yield from placement.attention(config, layer)
        yield from _feed_forward(config, layer)


def _feed_forward(config: ModelConfig, layer: int) -> Iterator[placement.Placed]:
    if not config.is_moe(layer):
        yield from placement.dense(config, layer)
        return
    yield from placement.experts(config, layer, "mlp", placement.EXPERT_NAMES)
    yield from placement.shared_expert(config, layer, "mlp.shared_expert")
    gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
    yield placement.whole(gate, f"{layer}.shared_gate", (1, config.hidden_size))


def unstack_gates(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield queries and gates apart, and a convolution's weights as one vector; other tensors as they are."""
    name, tensor = named
    block, _, kind = name.rpartition("self_attn.q_proj.")
    if kind == "weight":
        by_head = _rows_by(config, name, tensor, config.num_heads, [config.head_dim] * 2)
        for part, rows in zip(("q_proj", "gate_proj"), by_head, strict=True):
            yield f"{block}self_attn.{part}.weight", _rows(tensor, rows)
    elif name.endswith(".linear_attn.conv1d.weight") and isinstance(tensor, np.ndarray):
        yield name, tensor.reshape(-1)
    else:
        yield named


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """As `unstack_gates`; and what a delta net is given becomes four tensors."""
    name, tensor = named
    block, _, kind = name.rpartition(".in_proj_")
    if kind not in ("qkvz.weight", "ba.weight"):
        yield from unstack_gates(config, named)
        return
    assert config.recurrent is not None
    assert isinstance(config.recurrent.mixer, DeltaNet)
    net = config.recurrent.mixer
    shared = net.num_value_heads // net.num_key_heads
    sizes = [shared, shared] if kind[0] == "b" else [*[net.key_dim] * 2, *[shared * net.value_dim] * 2]
    *parts, last = _rows_by(config, name, tensor, net.num_key_heads, sizes)
    first_name, last_name = ("b", "a") if kind[0] == "b" else ("qkv", "z")
    yield f"{block}.in_proj_{first_name}.weight", _rows(tensor, np.concatenate(parts))
    yield f"{block}.in_proj_{last_name}.weight", _rows(tensor, last)


def _rows_by(
    config: ModelConfig, name: str, tensor: Array | QuantizedArray, num_heads: int, sizes: list[int]
) -> list[I64]:
    """Return which rows are of each part, where each head has `sizes` of them in turn."""
    if len(tensor) != num_heads * sum(sizes):
        raise ConfigError(f"{config.model_id}: {name} has {len(tensor)} rows, not {sum(sizes)} for {num_heads} heads")
    rows: Any = np.arange(len(tensor)).reshape(num_heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def _rows(tensor: Array | QuantizedArray, rows: I64) -> Array | QuantizedArray:
    return tensor.rows(rows) if isinstance(tensor, QuantizedArray) else tensor[rows]


def _read(hf: HfConfig) -> ModelConfig:
    config = hf.shared("qwen3_next", partial_rotary_factor=0.25)
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    dense = frozenset(i for i in range(config.num_layers) if i in listed or (i + 1) % step)
    num_next = hf.get("num_nextn_predict_layers", 1)  # published models have one, and do not say so
    return replace(with_delta_nets(config, hf), moe=shared_moe(hf, dense), num_next_layers=num_next)


QWEN3_NEXT = placement.Family(
    "Qwen3NextForCausalLM",
    _read,
    delta_placement,
    not_read=lambda _: NOT_READ,
    unstack=_unstack,
    next_name=next_name,
)
