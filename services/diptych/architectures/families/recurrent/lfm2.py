"""LFM2: layers of short convolutions between gates, and of attention as in Qwen 3. One network each, or experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Piece, Placed, Split, whole
from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.common.errors import ConfigError

NAMES: Final = ("w1", "w3", "w2")  # of gate, up and down
KINDS: Final = ("conv", "full_attention")
RENAMED: Final = {
    "norm_eps": "rms_norm_eps",
    "tie_embedding": "tie_word_embeddings",
    "block_ff_dim": "intermediate_size",
}
DEFAULTS: Final = {"norm_eps": 1e-5, "tie_word_embeddings": True}
THETA: Final = 1_000_000.0


def _read_dense(hf: HfConfig) -> ModelConfig:
    return _part(hf, "lfm2", lambda config, part: replace(config, ffn_size=_ffn_size(part)))


def _read_experts(hf: HfConfig) -> ModelConfig:
    return _part(hf, "lfm2_moe", lambda config, part: replace(config, moe=_moe(part, config.num_layers)))


def _part(hf: HfConfig, architecture: str, finish: Callable[[ModelConfig, HfConfig], ModelConfig]) -> ModelConfig:
    """Read the file with its keys named as other families have them."""
    hf.ignore("quantization_config")
    given = DEFAULTS | {key: hf[key] for key in hf if key != "quantization_config" and hf[key] is not None}
    ordered = sorted(given, key=lambda key: key in RENAMED)  # so that older names win
    values = {RENAMED.get(key, key): given[key] for key in ordered}
    return hf.part(values, lambda part: finish(_shared(part, architecture), part))


def _shared(hf: HfConfig, architecture: str) -> ModelConfig:
    hf.ignore("block_norm_eps", "conv_dim", "conv_dim_out", "block_dim", "num_heads", "theta", "use_pos_enc")
    hf.ignore(
        "block_use_swiglu",
        "block_use_xavier_init",
        "block_mlp_init_scale",
        "block_out_init_scale",
        "conv_use_xavier_init",
    )
    config = hf.shared(architecture, theta=THETA, tied=True)
    return replace(config, qk_norm="heads", recurrent=_recurrent(hf, config))


def _recurrent(hf: HfConfig, config: ModelConfig) -> Recurrent | None:
    attending, types = hf.get("full_attn_idxs"), hf.get("layer_types")
    if types is None:
        kept = range(config.num_layers) if attending is None else attending
        types = [KINDS[layer in kept] for layer in range(config.num_layers)]
    if len(types) != config.num_layers or not {*types} <= {*KINDS}:
        raise ConfigError(
            f"{hf.model_id}: layer_types of {config.num_layers} layers are {types}, which is not supported"
        )
    mixer = ShortConv(config.hidden_size, hf.get("conv_L_cache") or 3, has_bias=hf.get("conv_bias", False))
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "conv")
    return Recurrent(layers, mixer) if layers else None


def _ffn_size(hf: HfConfig) -> int:
    """Return the size of a network: two thirds of what the file says, rounded up, unless it says otherwise."""
    size, factor, unit = hf["intermediate_size"], hf.get("block_ffn_dim_multiplier"), hf.get("block_multiple_of", 256)
    if not hf.get("block_auto_adjust_ff_dim", True):
        return int(size)
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // unit) * unit


def _moe(hf: HfConfig, num_layers: int) -> Moe:
    return Moe(
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffn_size=hf["moe_intermediate_size"],
        normalize=hf.get("norm_topk_prob", True),
        dense_layers=frozenset(range(min(hf.get("num_dense_layers", 2), num_layers))),
        scoring="sigmoid",
        choice_bias=hf.get("use_expert_bias", True),
        scale=hf.get("routed_scaling_factor") or 1.0,
    )


def _placement(config: ModelConfig) -> Iterator[Placed]:
    for name, pieces in placement.embeddings(config):
        yield name.replace("model.norm.", "model.embedding_norm."), pieces
    for layer in range(config.num_layers):
        prefix, hidden = f"model.layers.{layer}.", config.hidden_size
        for name, target in (("operator_norm", "input_norm"), ("ffn_norm", "ffn_norm")):
            yield whole(f"{prefix}{name}.weight", f"{layer}.{target}", (hidden,))
        yield from _conv(config, layer) if config.is_recurrent(layer) else _attention(config, layer)
        yield from _experts(config, layer) if config.is_moe(layer) else _network(config, layer)


def _attention(config: ModelConfig, layer: int) -> Iterator[Placed]:
    for name, pieces in placement.attention(config, layer):
        yield name.replace("o_proj", "out_proj").replace("_norm.", "_layernorm."), pieces


def _conv(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.recurrent is not None
    mixer, hidden, prefix = config.recurrent.mixer, config.hidden_size, f"model.layers.{layer}.conv."
    assert isinstance(mixer, ShortConv)
    size = mixer.num_channels
    thirds = [i * size for i in range(3)]
    target = f"{layer}.mixer_in"
    yield f"{prefix}in_proj.weight", tuple(Piece(target, start, (size, hidden), Split.ROWS) for start in thirds)
    yield f"{prefix}conv.weight", (Piece(f"{layer}.mixer_conv", 0, (size, 1, mixer.conv_width), Split.ROWS, wide=True),)
    yield whole(f"{prefix}out_proj.weight", f"{layer}.mixer_out", (hidden, size), Split.COLUMNS)
    if mixer.has_bias:
        yield f"{prefix}in_proj.bias", tuple(Piece(f"{target}_bias", start, (size,), Split.ROWS) for start in thirds)
        yield f"{prefix}conv.bias", (Piece(f"{layer}.mixer_conv_bias", 0, (size,), Split.ROWS, wide=True),)
        yield whole(f"{prefix}out_proj.bias", f"{layer}.mixer_out_bias", (hidden,))


def _network(config: ModelConfig, layer: int) -> Iterator[Placed]:
    prefix = f"model.layers.{layer}.feed_forward."
    yield from placement.feed_forward(prefix, f"{layer}.", config.hidden_size, config.ffn_size, NAMES)


def _experts(config: ModelConfig, layer: int) -> Iterator[Placed]:
    assert config.moe is not None
    yield from placement.experts(config, layer, "feed_forward", NAMES)
    if config.moe.choice_bias:
        bias = Piece(f"{layer}.choice_bias", 0, (config.moe.num_experts,), wide=True)
        yield f"model.layers.{layer}.feed_forward.expert_bias", (bias,)


LFM2 = placement.Family("Lfm2ForCausalLM", _read_dense, _placement)
LFM2_MOE = placement.Family("Lfm2MoeForCausalLM", _read_experts, _placement)
