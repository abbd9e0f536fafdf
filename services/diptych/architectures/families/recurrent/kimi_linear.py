"""Kimi Linear: layers that keep a state by Kimi's delta rule, and between them attention by latents that never rotates.

Experts are as in DeepSeek V3. The layers behind the last one, which predict several tokens at once, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Rope
from diptych.architectures.families.latent.deepseek_v3 import layers_behind, read_moe, with_latents
from diptych.architectures.families.latent.glm4_moe_lite import listed_dense_layers
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Named, Piece, Placed, Split, whole
from diptych.architectures.recurrent import KimiDelta, Recurrent
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

BLOCK: Final = "block_sparse_moe"
# transformers saves the one network of a layer as if it were of experts
DENSE: Final = re.compile(rf"(model\.layers\.\d+\.){BLOCK}(\.(gate|up|down)_proj\..*)")
RENAMED: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
LINEAR: Final = {  # in `linear_attn_config`
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
LAYERS: Final = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}  # counted from 1


def _read(hf: HfConfig) -> ModelConfig:
    hf.ignore("quantization_config")
    return hf.part(_renamed(hf), _read_renamed)


def _renamed(hf: HfConfig) -> Mapping[str, Any]:
    """Return the file as other families write it."""
    values = {RENAMED.get(key, key): hf[key] for key in hf if key != "quantization_config"}
    linear = dict(values.pop("linear_attn_config", None) or {})
    values |= {name: linear.pop(key) for key, name in LINEAR.items() if key in linear}
    listed = {kind: linear.pop(key) for kind, key in LAYERS.items() if key in linear}
    if linear:
        raise ConfigError(f"{hf.model_id}: {', '.join(sorted(linear))} of linear_attn_config is not supported")
    if len(listed) == len(LAYERS) and values.get("layer_types") is None:
        values["layer_types"] = _layer_types(listed, hf)
    return {"first_k_dense_replace": 1, **values}


def _layer_types(listed: Mapping[str, list[int]], hf: HfConfig) -> list[str]:
    kinds = {layer: kind for kind, layers in listed.items() for layer in layers}
    numbers = range(1, hf["num_hidden_layers"] + 1)
    if sorted(each for layers in listed.values() for each in layers) != [*numbers]:
        raise ConfigError(f"{hf.model_id}: linear_attn_config does not list each of {len(numbers)} layers once")
    return [kinds[number] for number in numbers]


def _read_renamed(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "mla_use_nope": (True,)})
    hf.refuse_unless({"moe_layer_freq": (1,), "rope_scaling": (), "rope_parameters": (), "attn_res_block_size": ()})
    hf.refuse_unless({"mla_use_output_gate": (False,), "routed_expert_hidden_size": ()})
    hf.ignore("num_nextn_predict_layers", "qk_head_dim", "use_grouped_topk", "rope_theta")
    config = hf.shared("kimi_linear")
    moe, latents = read_moe(hf, config.num_layers), with_latents(config, hf)
    if hf.get("mlp_layer_types") is not None:
        moe = replace(moe, dense_layers=listed_dense_layers(hf, config.num_layers))
    assert latents.latent is not None
    return replace(
        latents,
        rope=replace(Rope.still(latents.latent.rope_dim), start=latents.latent.rank),
        latent=replace(latents.latent, interleaved=False),
        moe=moe,
        recurrent=_recurrent(hf, config.num_layers),
    )


def _recurrent(hf: HfConfig, num_layers: int) -> Recurrent:
    usual = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(num_layers)]
    types = hf.get("layer_types") or usual
    if len(types) != num_layers or not {*types} <= {*LAYERS}:
        raise ConfigError(f"{hf.model_id}: layer_types of {num_layers} layers are {types}, which is not supported")
    mixer = KimiDelta(hf["linear_num_heads"], hf["linear_head_dim"], hf["linear_conv_kernel_dim"])
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    return Recurrent(layers, mixer)


def _placement(config: ModelConfig) -> Iterator[Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from (_delta if config.is_recurrent(layer) else placement.latent_attention)(config, layer)
        yield from _experts(config, layer) if config.is_moe(layer) else placement.dense(config, layer)


def _delta(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.recurrent is not None
    mixer = config.recurrent.mixer
    assert isinstance(mixer, KimiDelta)
    prefix, hidden, size, dim = f"model.layers.{layer}.self_attn.", config.hidden_size, mixer.out_size, mixer.head_dim
    for i, name in enumerate("qkv"):
        yield f"{prefix}{name}_proj.weight", (Piece(f"{layer}.mixer_in", i * size, (size, hidden), Split.ROWS),)
        kernel = Piece(f"{layer}.mixer_conv", i * size, (size, 1, mixer.conv_width), Split.ROWS, wide=True)
        yield f"{prefix}{name}_conv1d.weight", (kernel,)
    betas = Piece(f"{layer}.mixer_in", 3 * size, (mixer.num_heads, hidden), Split.ROWS)
    yield f"{prefix}b_proj.weight", (betas,)
    for i, (name, target) in enumerate((("f", "mixer_decays"), ("g", "mixer_gates"))):
        yield f"{prefix}{name}_a_proj.weight", (Piece(f"{layer}.mixer_low", i * dim, (dim, hidden)),)
        yield whole(f"{prefix}{name}_b_proj.weight", f"{layer}.{target}", (size, dim), Split.ROWS)
    for name, target, rows in (("A_log", "decay_rate_log", mixer.num_heads), ("dt_bias", "decay_bias", size)):
        yield f"{prefix}{name}", (Piece(f"{layer}.{target}", 0, (rows,), Split.ROWS, wide=True),)
    yield whole(f"{prefix}o_norm.weight", f"{layer}.mixer_norm", (dim,))
    yield whole(f"{prefix}o_proj.weight", f"{layer}.mixer_out", (hidden, size), Split.COLUMNS)


def _experts(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.moe is not None
    yield from placement.experts(config, layer, BLOCK, ("w1", "w3", "w2"))
    bias = Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
    yield f"model.layers.{layer}.{BLOCK}.gate.e_score_correction_bias", (bias,)
    if config.moe.shared_ffn_size:
        yield from placement.shared_expert(config, layer, f"{BLOCK}.shared_experts")


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield decays of heads as a vector, and what transformers calls by another name than the publisher."""
    name, tensor = named
    if name.endswith(".A_log") and not isinstance(tensor, QuantizedArray):
        tensor = tensor.reshape(-1)
    yield DENSE.sub(r"\1mlp\2", name), tensor


KIMI_LINEAR = placement.Family("KimiLinearForCausalLM", _read, _placement, not_read=layers_behind, unstack=_unstack)
