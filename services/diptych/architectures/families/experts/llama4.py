"""Llama 4: attention in chunks, layers without rotation, and one of many experts beside one for every token.

Three of four layers rotate and see only a chunk of the text; the others see all of it, do not rotate, and have queries
that grow with the position. A checkpoint keeps all experts of a layer in one tensor, transposed, ups behind gates.
Models that know images are served for text: what looks at images is not read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe, QueryGrowth, Rope
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import EXPERT_NAMES, Family, Named, Piece, Placed
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

TEXT: Final = "language_model."
IMAGES: Final = ("vision_model.", "multi_modal_projector.")
STACKED: Final = re.compile(r"(?P<block>.*\.feed_forward\.experts\.)(?P<name>gate_up|down)_proj")
CHUNKED: Final = "chunked_attention"


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "num_experts_per_tok": (1,)})
    hf.ignore("for_llm_compressor", "_attn_implementation_autoset")
    config = hf.shared("llama4_text", theta=500_000.0)
    return replace(
        config,
        ffn_size=hf.get("intermediate_size_mlp", 16_384),
        windows=_chunks(hf, config.num_layers),
        chunked=True,
        rope=Rope.still(config.head_dim),
        local_rope=_rope(hf, config),
        qk_norm="unweighted" if hf.get("use_qk_norm", True) else None,
        query_growth=_growth(hf) if hf.get("attn_temperature_tuning", True) else None,
        moe=_moe(hf, config),
    )


def _chunks(hf: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Return how large the chunks of each layer are; 0: it sees all, and does not rotate."""
    interval = hf.get("no_rope_layer_interval", 4)
    rotate = hf.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    types = hf.get("layer_types") or [CHUNKED if each else "full_attention" for each in rotate]
    if len(rotate) != num_layers or len(types) != num_layers:
        raise ConfigError(f"{hf.model_id}: layer_types and no_rope_layers are not of {num_layers} layers")
    if [each == CHUNKED for each in types] != list(map(bool, rotate)) or set(types) - {CHUNKED, "full_attention"}:
        raise ConfigError(f"{hf.model_id}: layer_types other than {CHUNKED} where layers rotate are not supported")
    size = hf.get("attention_chunk_size", 8192)
    if not size:
        raise ConfigError(f"{hf.model_id}: attention_chunk_size={size!r} in config.json is not supported")
    return tuple(size if each else 0 for each in rotate)


def _rope(hf: HfConfig, config: ModelConfig) -> Rope:
    """Return the embedding of the layers that rotate."""
    if config.rope.dim != config.head_dim or config.rope.scale != 1:
        raise ConfigError(f"{hf.model_id}: a rotation of a part of a head, or one that scales, is not supported")
    return replace(config.rope, interleaved=True)


def _growth(hf: HfConfig) -> QueryGrowth:
    period, factor = hf.get("floor_scale", 8192), hf.get("attn_scale", 0.1)
    if period < 1:
        raise ConfigError(f"{hf.model_id}: floor_scale must be at least 1, not {period}")
    return QueryGrowth(period, float(factor), still_only=True, counts_itself=True)


def _moe(hf: HfConfig, config: ModelConfig) -> Moe:
    step, listed = hf.get("interleave_moe_layer_step", 1), hf.get("moe_layers")
    sparse = range(step - 1, config.num_layers, step) if listed is None else listed
    return Moe(
        num_experts=hf["num_local_experts"],
        experts_per_token=1,
        ffn_size=config.ffn_size,
        normalize=False,
        dense_layers=frozenset(range(config.num_layers)) - frozenset(sparse),
        scoring="sigmoid",
        shared_ffn_size=config.ffn_size,
        scales_inputs=True,
    )


def _placement(config: ModelConfig) -> Iterator[Placed]:
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.attention(config, layer)
        yield from _feed_forward(config, layer)


def _feed_forward(config: ModelConfig, layer: int) -> Iterator[Placed]:
    prefix, hidden = f"model.layers.{layer}.feed_forward.", config.hidden_size
    if not config.is_moe(layer):
        yield from placement.feed_forward(prefix, f"{layer}.", hidden, config.ffn_size, EXPERT_NAMES)
        return
    assert config.moe is not None
    num_experts, ffn_size = config.moe.num_experts, config.moe.ffn_size
    router = Piece(f"{layer}.router", 0, (num_experts, hidden), wide=config.moe.is_routed_wide)
    yield f"{prefix}router.weight", (router,)
    for i in range(num_experts):
        target = f"{layer}.experts.{i}."
        yield from placement.feed_forward(f"{prefix}experts.{i}.", target, hidden, ffn_size, EXPERT_NAMES)
    yield from placement.shared_expert(config, layer, "feed_forward.shared_expert")


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield the gate, up and down of each expert; other tensors as they are."""
    name, tensor = named
    match = STACKED.fullmatch(name)
    if match is None:
        yield named
    else:
        yield from placement.unstacked(match, (each.T for each in placement.by_expert(config, name, tensor)))


def _read_with_images(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    hf.ignore("boi_token_id", "eoi_token_id", "image_token_id", "_attn_implementation_autoset")
    shared = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    outer: dict[str, Any] = {key: hf.get(key) for key in shared if key in hf}
    return replace(hf.part(outer | hf["text_config"], _read), architecture="llama4")


def _placement_with_images(config: ModelConfig) -> Iterator[Placed]:
    return ((TEXT + name, pieces) for name, pieces in _placement(config))


LLAMA4_TEXT = Family("Llama4ForCausalLM", _read, _placement, unstack=_unstack)
LLAMA4 = Family(
    "Llama4ForConditionalGeneration",
    _read_with_images,
    _placement_with_images,
    not_read=lambda _: IMAGES,
    unstack=_unstack,
)
