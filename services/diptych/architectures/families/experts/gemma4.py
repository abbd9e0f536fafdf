"""Gemma 4: two kinds of attention, layers that borrow keys and values, and embeddings for each layer.

Layers without a window have wider heads and fewer of them for keys and values, in some models made by one projection.
The last layers may have none and attend to those of the last layer of their kind before them. Models that know images
or sounds are served for text: what looks at or listens to them is not read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe, WideHeads
from diptych.architectures.hf_config import LAYER_TYPES, HfConfig
from diptych.architectures.placement import EXPERT_NAMES, Family, Named, Piece, Placed, Split
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

TEXT_DEFAULTS: Final[dict[str, Any]] = {  # what files of models with images may leave out
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262_144,
}
STACKED: Final = re.compile(r"(?P<block>.*\.experts\.)(?P<name>gate_up|down)_proj")
TEXT: Final = "model.language_model."
OTHERS: Final = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
OWN_ROPES: Final = ("default", "proportional")
NORMS: Final = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}
MOE_NORMS: Final = {
    "pre_feedforward_layernorm": "dense_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_1": "dense_post_norm",
    "post_feedforward_layernorm_2": "experts_post_norm",
    "router": "router_scale",
}


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"attention_bias": (False,), "use_bidirectional_attention": ("vision",)})
    hf.refuse_unless({"hidden_activation": ("gelu_pytorch_tanh",)})
    hf.ignore("hidden_act", "num_experts", "top_k_experts", "moe_intermediate_size")  # where there are no experts
    hf.ignore("global_head_dim", "num_global_key_value_heads")  # where `per_layer_config` lists them
    full, sliding = (_rope_parameters(hf, kind) for kind in LAYER_TYPES)
    config = hf.shared("gemma4_text", tied=True)
    windows = _windows(hf, config.num_layers)
    wide = _wide(hf, config, windows)
    return replace(
        config,
        windows=windows,
        wide=wide,
        rope=hf.rope({"rope_theta": 1e6, **full}, wide.head_dim, 1e6),
        local_rope=hf.rope({"rope_theta": 1e4, **sliding}, config.head_dim, 1e4),
        num_borrowing=hf.get("num_kv_shared_layers") or 0,
        borrowing_ffn_size=2 * config.ffn_size if hf.get("use_double_wide_mlp") else 0,
        activation="gelu_tanh",
        query_scale=1.0,
        qk_norm="heads",
        value_norm=True,
        post_norms=True,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=hf.get("final_logit_softcapping") or 0.0,
        per_layer_dim=_per_layer_dim(hf, config),
        layer_scales=True,
        moe=_moe(hf) if hf.get("enable_moe_block") else None,
    )


def _windows(hf: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers' windows. Whatever is said of it, the last layer has none, as in transformers."""
    local = [layer for layer in range(num_layers - 1) if (layer + 1) % 6]
    windows = hf.windows(hf.get("sliding_window", 512), local)
    windows = (*windows[:-1], 0)
    return windows if any(windows) else ()


def _rope_parameters(hf: HfConfig, kind: str) -> dict[str, Any]:
    """Return what is said of a kind of layers. Where heads rotate plainly, all of a head does."""
    all_kinds = hf.get("rope_parameters") or {}
    unset = {"rope_type": "proportional", "partial_rotary_factor": 0.25} if kind == LAYER_TYPES[0] else {}
    parameters = dict(all_kinds.get(kind) or unset)
    name = parameters.get("rope_type", OWN_ROPES[0])
    if name not in OWN_ROPES:
        raise ConfigError(f"{hf.model_id}: rope_type={name!r} of {kind} in config.json is not supported")
    if name == OWN_ROPES[0]:
        parameters.pop("partial_rotary_factor", None)
    return parameters


def _wide(hf: HfConfig, config: ModelConfig, windows: tuple[int, ...]) -> WideHeads:
    """Return the heads of layers without a window: by keys of their own, or by those of each such layer."""
    one_projection = bool(hf.get("attention_k_eq_v"))
    said = {"head_dim": hf.get("global_head_dim") or 512}
    heads = hf.get("num_global_key_value_heads")
    if one_projection and heads:
        said["num_key_value_heads"] = heads
    listed = hf.get("per_layer_config")
    if listed is not None:
        said = _listed(hf, listed, [i for i in range(config.num_layers) if not windows or not windows[i]])
    kv_heads = said.get("num_key_value_heads", config.num_kv_heads)
    head_dim = said.get("head_dim", config.head_dim)
    return WideHeads(head_dim, kv_heads, kv_heads, config.num_kv_heads, one_projection)


def _listed(hf: HfConfig, listed: dict[str, Any], layers: list[int]) -> dict[str, int]:
    """Return what `per_layer_config` says of each of `layers`, which must be the same."""
    by_layer = {int(layer): said for layer, said in listed.items()}
    said: dict[str, int] = by_layer.get(layers[0], {})
    if by_layer != {layer: said for layer in layers if said} or set(said) - {"head_dim", "num_key_value_heads"}:
        raise ConfigError(
            f"{hf.model_id}: per_layer_config other than heads of all layers without a window is not supported"
        )
    if any(type(each) is not int or not 0 < each < 1 << 14 for each in said.values()):
        raise ConfigError(f"{hf.model_id}: per_layer_config={said!r:.60} in config.json is not supported")
    return said


def _per_layer_dim(hf: HfConfig, config: ModelConfig) -> int:
    dim: int = hf.get("hidden_size_per_layer_input", 256) or 0
    if dim:
        hf.refuse_unless({"vocab_size_per_layer_input": (config.vocab_size,)})
    else:
        hf.ignore("vocab_size_per_layer_input")
    return dim


def _moe(hf: HfConfig) -> Moe:
    sizes: dict[str, Any] = {key: hf.get(key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    missing = [key for key, size in sizes.items() if not size]
    if missing:
        raise ConfigError(f"{hf.model_id}: enable_moe_block is true, but the configuration has no {missing[0]}")
    num_experts, per_token, ffn_size = sizes.values()
    return Moe(num_experts, per_token, ffn_size, normalize=True, beside_dense=True)


def _placement(config: ModelConfig) -> Iterator[Placed]:
    yield from placement.embeddings(config)
    yield from _per_layer_inputs(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, target in NORMS.items():
            yield _norm(f"{prefix}{name}.weight", f"{layer}.{target}", config.hidden_size)
        yield _norm(f"{prefix}layer_scalar", f"{layer}.scale", 1)
        yield from _attention(config, layer)
        size = config.ffn_size_of(layer)
        yield from placement.feed_forward(prefix, f"{layer}.", config.hidden_size, size)
        yield from _experts(config, layer) if config.moe else _plain(config, layer)


def _norm(name: str, target: str, size: int) -> Placed:
    """Norms multiply in float32: what is normed is rounded once, at the end."""
    return name, (Piece(target, 0, (size,), wide=True),)


def _per_layer_inputs(config: ModelConfig) -> Iterator[Placed]:
    dim, hidden = config.per_layer_dim, config.hidden_size
    if not dim:
        return
    all_layers = config.num_layers * dim
    shape = (config.vocab_size, all_layers)
    yield placement.whole("model.embed_tokens_per_layer.weight", "embed_per_layer", shape, Split.ROWS)
    yield placement.whole("model.per_layer_model_projection.weight", "to_layers", (all_layers, hidden))
    yield _norm("model.per_layer_projection_norm.weight", "to_layers_norm", dim)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield placement.whole(f"{prefix}per_layer_input_gate.weight", f"{layer}.input_gate", (dim, hidden))
        yield placement.whole(f"{prefix}per_layer_projection.weight", f"{layer}.input_up", (hidden, dim))
        yield _norm(f"{prefix}post_per_layer_input_norm.weight", f"{layer}.input_post_norm", hidden)


def _attention(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Queries of every layer; keys of those that keep some; values where they have a projection of their own."""
    prefix, dim, wide = f"model.layers.{layer}.self_attn.", config.head_dim_of(layer), config.wide_at(layer)
    q_rows, kv_rows = config.num_heads * dim, config.kv_heads_of(layer) * dim
    parts = [("q", 0, q_rows)]
    if config.keeps(layer):
        parts.append(("k", q_rows, kv_rows))
        yield _norm(f"{prefix}k_norm.weight", f"{layer}.k_norm", dim)
        if wide is None or not wide.keys_are_values:
            parts.append(("v", q_rows + kv_rows, kv_rows))
    for name, start, rows in parts:
        piece = Piece(f"{layer}.qkv", start, (rows, config.hidden_size), Split.ROWS)
        yield f"{prefix}{name}_proj.weight", (piece,)
    yield _norm(f"{prefix}q_norm.weight", f"{layer}.q_norm", dim)
    yield placement.whole(f"{prefix}o_proj.weight", f"{layer}.o", (config.hidden_size, q_rows), Split.COLUMNS)


def _plain(config: ModelConfig, layer: int) -> Iterator[Placed]:
    name = f"model.layers.{layer}.pre_feedforward_layernorm.weight"
    yield _norm(name, f"{layer}.ffn_norm", config.hidden_size)


def _experts(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.moe is not None
    prefix, hidden, num_experts = f"model.layers.{layer}.", config.hidden_size, config.moe.num_experts
    for name, target in MOE_NORMS.items():
        own = "scale" if name == "router" else "weight"
        yield _norm(f"{prefix}{name}.{own}", f"{layer}.{target}", hidden)
    yield placement.whole(f"{prefix}router.proj.weight", f"{layer}.router", (num_experts, hidden))
    yield _norm(f"{prefix}router.per_expert_scale", f"{layer}.expert_scales", num_experts)
    for i in range(num_experts):
        target = f"{layer}.experts.{i}."
        names = f"{prefix}experts.{i}.", target, hidden, config.moe.ffn_size, EXPERT_NAMES
        yield from placement.feed_forward(*names)


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield the gate, up and down of each expert; other tensors as they are."""
    name, tensor = named
    match = STACKED.fullmatch(name)
    if match is None:
        yield named
    else:
        yield from placement.unstacked(match, placement.by_expert(config, name, tensor))


def _not_read(config: ModelConfig) -> tuple[str, ...]:
    """Return the keys and values of layers that borrow them: checkpoints may have some, which nobody computes."""
    borrowing = [layer for layer in range(config.num_layers) if not config.keeps(layer)]
    return tuple(
        f"model.layers.{layer}.self_attn.{name}"
        for layer in borrowing
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )


def _read_with_others(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images and sounds are not supported; the model is served for text", hf.model_id)
    hf.ignore("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id")
    hf.ignore("boa_token_id", "eoa_token_index", "eoa_token_id", "audio_token_id", "vision_soft_tokens_per_image")
    shared = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    outer: dict[str, Any] = {key: hf.get(key) for key in shared if key in hf}
    return replace(hf.part(TEXT_DEFAULTS | hf["text_config"] | outer, _read), architecture="gemma4")


def _in_text(name: str) -> str:
    """Return how models with images call a tensor of the text model."""
    return TEXT + name.removeprefix("model.") if name.startswith("model.") else name


def _placement_with_others(config: ModelConfig) -> Iterator[Placed]:
    return ((_in_text(name), pieces) for name, pieces in _placement(config))


def _not_read_with_others(config: ModelConfig) -> tuple[str, ...]:
    return (*OTHERS, *map(_in_text, _not_read(config)))


GEMMA4_TEXT = Family("Gemma4ForCausalLM", _read, _placement, not_read=_not_read, unstack=_unstack)
GEMMA4 = Family(
    "Gemma4ForConditionalGeneration",
    _read_with_others,
    _placement_with_others,
    not_read=_not_read_with_others,
    unstack=_unstack,
)
