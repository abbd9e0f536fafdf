"""Nemotron-H and Nemotron 3: blocks of Mamba 2, of attention that does not rotate, and of networks or experts.

A block is one of these behind a norm. Ours are layers: a block that looks back and the network that follows it, if one
does; else one of them alone. What predicts several tokens at once is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe, Rope
from diptych.architectures.families.latent.deepseek_v3 import read_moe
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Piece, Placed, Split, whole
from diptych.architectures.recurrent import Mamba2, Recurrent
from diptych.common.errors import ConfigError

MAMBA, ATTENTION, NETWORK, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
KINDS: Final = {  # letters of a pattern, and older names
    **{"M": MAMBA, "*": ATTENTION, "-": NETWORK, "E": EXPERTS},
    **{"mamba": MAMBA, "attention": ATTENTION},
    **{each: each for each in (MAMBA, ATTENTION, NETWORK, EXPERTS)},
}
BEHIND: Final = ("mtp.",)


class _Layer(NamedTuple):
    looks_back: str | None  # MAMBA or ATTENTION
    ffn: str | None  # NETWORK or EXPERTS


def _read(hf: HfConfig) -> ModelConfig:
    hf.ignore("quantization_config")
    values = {key: hf[key] for key in hf if key != "quantization_config"}
    layers = _layers(hf)
    values |= {"num_hidden_layers": len(layers), "rms_norm_eps": values.pop("layer_norm_epsilon", 1e-5)}
    return hf.part(values, lambda part: _read_layers(part, layers))


def _layers(hf: HfConfig) -> list[_Layer]:
    blocks = hf.get("layers_block_type") or hf.get("hybrid_override_pattern")
    if not blocks:
        raise ConfigError(f"{hf.model_id}: neither layers_block_type nor hybrid_override_pattern says what there is")
    unknown = sorted({*blocks} - KINDS.keys())
    if unknown:
        raise ConfigError(f"{hf.model_id}: blocks {', '.join(unknown)} are not supported; {', '.join(KINDS)} are")
    return _paired([KINDS[block] for block in blocks])


def _paired(blocks: Sequence[str]) -> list[_Layer]:
    layers: list[_Layer] = []
    for block in blocks:
        if block in (MAMBA, ATTENTION):
            layers.append(_Layer(block, None))
        elif layers and layers[-1].ffn is None:
            layers[-1] = layers[-1]._replace(ffn=block)
        else:
            layers.append(_Layer(None, block))
    return layers


def _read_layers(hf: HfConfig, layers: Sequence[_Layer]) -> ModelConfig:
    hf.refuse_unless({"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "residual_in_fp32": (False,)})
    hf.refuse_unless({key: (False,) for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias")})
    hf.refuse_unless({"sliding_window": (), "rope_scaling": (), "rope_parameters": (), "n_shared_experts": (1,)})
    hf.ignore("layers_block_type", "hybrid_override_pattern", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    hf.ignore("num_nextn_predict_layers", "chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype")
    hf.ignore("moe_shared_expert_overlap", "num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels")
    hf.ignore("time_step_floor", "time_step_limit", "time_step_max", "norm_eps", "rope_theta", "partial_rotary_factor")
    config = hf.shared("nemotron_h")
    return replace(
        config,
        rope=Rope.still(config.head_dim),
        activation="relu_squared",
        moe=_moe(hf, layers),
        recurrent=_recurrent(hf, layers),
        ffn_only=_where(layers, lambda layer: layer.looks_back is None),
        without_ffn=_where(layers, lambda layer: layer.ffn is None),
    )


def _where(layers: Sequence[_Layer], holds: Callable[[_Layer], bool]) -> frozenset[int]:
    return frozenset(i for i, layer in enumerate(layers) if holds(layer))


def _moe(hf: HfConfig, layers: Sequence[_Layer]) -> Moe | None:
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
    others = _where(layers, lambda layer: layer.ffn != EXPERTS)
    if len(others) == len(layers):
        hf.ignore(*keys, "norm_topk_prob", "routed_scaling_factor", "n_shared_experts", "moe_latent_size")
        hf.ignore("moe_shared_expert_intermediate_size")
        return None
    return replace(
        read_moe(hf, len(layers)),
        dense_layers=others,
        shared_ffn_size=hf["moe_shared_expert_intermediate_size"],
        latent_size=hf.get("moe_latent_size") or 0,
    )


def _recurrent(hf: HfConfig, layers: Sequence[_Layer]) -> Recurrent | None:
    mixer = Mamba2(
        num_heads=hf["mamba_num_heads"],
        head_dim=hf["mamba_head_dim"],
        num_groups=hf["n_groups"],
        state_size=hf["ssm_state_size"],
        conv_width=hf["conv_kernel"],
        min_step=float(hf.get("time_step_min", 0.001)),
        conv_bias=hf.get("use_conv_bias", True),
    )
    if mixer.num_groups < 1 or mixer.num_heads % mixer.num_groups:
        raise ConfigError(f"{hf.model_id}: {mixer.num_heads} heads do not make {mixer.num_groups} groups")
    states = _where(layers, lambda layer: layer.looks_back == MAMBA)
    return Recurrent(tuple(sorted(states)), mixer) if states else None


def _placement(config: ModelConfig) -> Iterator[Placed]:
    shape, block = (config.vocab_size, config.hidden_size), 0
    yield whole("backbone.embeddings.weight", "embed", shape, Split.ROWS)
    yield whole("backbone.norm_f.weight", "norm", (config.hidden_size,))
    if not config.tie_embeddings:
        yield whole("lm_head.weight", "lm_head", shape, Split.ROWS)
    for layer in range(config.num_layers):
        parts = [_looks_back] * config.looks_back(layer) + [_ffn] * config.has_ffn(layer)
        for part, norm in zip(parts, ("input_norm", "ffn_norm"), strict=False):
            prefix = f"backbone.layers.{block}."
            yield whole(f"{prefix}norm.weight", f"{layer}.{norm}", (config.hidden_size,))
            yield from part(config, layer, f"{prefix}mixer.")
            block += 1


def _looks_back(config: ModelConfig, layer: int, prefix: str) -> Iterator[Placed]:
    if config.is_recurrent(layer):
        yield from _mamba(config, layer, prefix)
        return
    for name, pieces in placement.attention(config, layer):
        yield name.replace(f"model.layers.{layer}.self_attn.", prefix), pieces


def _mamba(config: ModelConfig, layer: int, prefix: str) -> Iterator[Placed]:
    assert config.recurrent is not None
    mixer = config.recurrent.mixer
    assert isinstance(mixer, Mamba2)
    size, vectors, hidden = mixer.out_size, mixer.num_groups * mixer.state_size, config.hidden_size
    yield f"{prefix}in_proj.weight", _rows(f"{layer}.mixer_in", (size, size, vectors, vectors, mixer.num_heads), hidden)
    channels, kernel = (size, vectors, vectors), (1, mixer.conv_width)
    yield f"{prefix}conv1d.weight", _rows(f"{layer}.mixer_conv", channels, *kernel, wide=True)
    if mixer.conv_bias:
        yield f"{prefix}conv1d.bias", _rows(f"{layer}.mixer_conv_bias", channels, wide=True)
    for name, target in (("A_log", "decay_rate_log"), ("dt_bias", "step_bias"), ("D", "mixer_skip")):
        yield f"{prefix}{name}", _rows(f"{layer}.{target}", (mixer.num_heads,), wide=True)
    yield whole(f"{prefix}norm.weight", f"{layer}.mixer_norm", (size,), Split.ROWS)
    yield whole(f"{prefix}out_proj.weight", f"{layer}.mixer_out", (hidden, size), Split.COLUMNS)


def _rows(target: str, sizes: Sequence[int], *others: int, wide: bool = False) -> tuple[Piece, ...]:
    """Return pieces behind each other, of which ranks take a part each."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pairs = zip(starts, sizes, strict=True)
    return tuple(Piece(target, start, (size, *others), Split.ROWS, wide) for start, size in pairs)


def _ffn(config: ModelConfig, layer: int, prefix: str) -> Iterator[Placed]:
    if config.is_moe(layer):
        yield from _experts(config, layer, prefix)
    else:
        yield from _network(prefix, f"{layer}.", config.hidden_size, config.ffn_size)


def _network(prefix: str, target: str, hidden_size: int, ffn_size: int) -> Iterator[Placed]:
    yield whole(f"{prefix}up_proj.weight", f"{target}gate_up", (ffn_size, hidden_size), Split.ROWS)
    yield whole(f"{prefix}down_proj.weight", f"{target}down", (hidden_size, ffn_size), Split.COLUMNS)


def _experts(config: ModelConfig, layer: int, prefix: str) -> Iterator[Placed]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    yield f"{prefix}gate.weight", (Piece(f"{layer}.router", 0, (moe.num_experts, hidden), wide=True),)
    bias = Piece(f"{layer}.choice_bias", 0, (moe.num_experts,), wide=True)
    yield f"{prefix}gate.e_score_correction_bias", (bias,)
    if moe.latent_size:
        yield whole(f"{prefix}fc1_latent_proj.weight", f"{layer}.latent_in", (moe.latent_size, hidden))
        yield whole(f"{prefix}fc2_latent_proj.weight", f"{layer}.latent_out", (hidden, moe.latent_size))
    for i in range(moe.num_experts):
        name, target = f"{prefix}experts.{i}.", f"{layer}.experts.{i}."
        yield from _network(name, target, moe.latent_size or hidden, moe.ffn_size)
    yield from _network(f"{prefix}shared_experts.", f"{layer}.shared.", hidden, moe.shared_ffn_size)


NEMOTRON_H = placement.Family("NemotronHForCausalLM", _read, _placement, not_read=lambda _: BEHIND)
