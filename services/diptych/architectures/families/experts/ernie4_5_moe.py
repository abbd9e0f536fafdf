"""Ernie 4.5 with experts in some layers, chosen by a softmax that a bias corrects, and one for every token.

What predicts several tokens at once is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig
from diptych.kernels.quantized import QuantizedArray

BIAS: Final = "mlp.moe_statics.e_score_correction_bias"


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "use_bias": (False,), "moe_gate": ("topk",)})
    hf.ignore("moe_norm_min", "num_nextn_predict_layers")
    config = hf.shared("ernie4_5_moe", theta=500_000.0, tied=True)
    ffn_size = hf["moe_intermediate_size"]
    moe = Moe(
        num_experts=hf["moe_num_experts"],
        experts_per_token=hf["moe_k"],
        ffn_size=ffn_size,
        normalize=True,
        dense_layers=_dense_layers(hf, config.num_layers),
        choice_bias=True,
        shared_ffn_size=ffn_size * (hf.get("moe_num_shared_experts") or 0),
    )
    return replace(config, rope=replace(config.rope, interleaved=True), moe=moe)


def _dense_layers(hf: HfConfig, num_layers: int) -> frozenset[int]:
    first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
    interval, end = hf.get("moe_layer_interval", 1), num_layers if last == -1 else last + 1
    return frozenset(i for i in range(num_layers) if not first <= i < end or (i + 1) % interval)


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from _experts(config, layer) if config.is_moe(layer) else placement.dense(config, layer)


def _experts(config: ModelConfig, layer: int) -> Iterator[placement.Placed]:
    assert config.moe is not None
    yield from placement.experts(config, layer, "mlp", placement.EXPERT_NAMES)
    bias = placement.Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
    yield f"model.layers.{layer}.{BIAS}", (bias,)
    if config.moe.shared_ffn_size:
        yield from placement.shared_expert(config, layer, "mlp.shared_experts")


def _unstack(config: ModelConfig, named: placement.Named) -> Iterator[placement.Named]:
    """Yield the bias of the one group of experts that there is as a vector; other tensors as they are."""
    name, tensor = named
    if name.endswith(BIAS) and not isinstance(tensor, QuantizedArray) and len(tensor) == 1:
        tensor = tensor[0]
    yield name, tensor


ERNIE4_5_MOE = placement.Family(
    "Ernie4_5_MoeForCausalLM", _read, _placement, not_read=lambda _: ("model.mtp_",), unstack=_unstack
)
