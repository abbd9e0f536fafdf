"""Mistral Large 4, served for text: what looks at images is not read, nor what predicts several tokens at once.

Attention by latents that an indexer chooses from, as in GLM 5, and experts as in Mistral Small 4. Three things are
learned where others have constants: by which factor each frequency of the rotation is stretched, how the queries of
each head grow with their position, and what an indexer's queries are made of. Some layers do not rotate, and some
attend to the latents of an earlier one. Checkpoints have the names of Mistral's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import moe_placement, read_moe, with_latents
from diptych.architectures.families.latent.deepseek_v32 import SPARSE_TYPES, read_indexer
from diptych.architectures.families.latent.glm4_moe_lite import listed_dense_layers
from diptych.architectures.families.latent.glm_moe_dsa import indexing_layers
from diptych.architectures.families.latent.mistral3 import IGNORED, OUTER, TEXT_DEFAULTS
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Placed, Split, whole
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array

logger = logging.getLogger(__name__)

DEFAULTS: Final = TEXT_DEFAULTS | {"final_logit_softcapping": 30.0, "first_k_dense_replace": 1, "n_shared_experts": 1}
ALPHA: Final = "lerope.alpha"
OTHERS: Final = (
    "vision_encoder.",
    "pre_mm_projector_norm.",
    "patch_merger.",
    "vision_language_adapter.",
    "mtp_dspark.",
)
NAMES: Final = (  # of other families, in this order, and what takes their place
    ("model.embed_tokens.", "tok_embeddings."),
    ("model.", ""),
    ("lm_head.", "output."),
    (".self_attn.", ".attention."),
    (".mlp.gate.", ".gate."),
    (".mlp.experts.", ".experts."),
    (".mlp.shared_experts.", ".shared_experts."),
    (".mlp.", ".feed_forward."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
    (".q_proj.", ".wq."),
    (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa."),
    (".kv_a_layernorm.", ".kv_a_norm."),
    (".kv_b_proj.", ".wkv_b."),
    (".o_proj.", ".wo."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
)


def _read(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore(*IGNORED)
    outer = {key: hf.get(key) for key in OUTER if key in hf}
    return hf.part(DEFAULTS | outer | hf["text_config"], _read_text)


def _read_text(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless(
        {"hidden_act": ("silu",), "attention_bias": (False,), "q_lora_rank": (), "rope_interleave": (True,)}
    )
    hf.ignore("qk_head_dim", "num_nextn_predict_layers")
    if not hf.rope_parameters:
        raise ConfigError(f"{hf.model_id}: text_config has no rope_parameters, of which this family has no one kind")
    if {*(hf.get("layer_types") or ())} - SPARSE_TYPES:
        raise ValueError(f"layer_types other than indexed_attention: {hf['layer_types']}")
    config = with_latents(hf.shared("mistral_large4"), hf)
    assert config.latent is not None
    moe = replace(read_moe(hf, config.num_layers), scoring="softmax", choice_bias=False, wide_router=True)
    if hf.get("mlp_layer_types"):
        moe = replace(moe, dense_layers=listed_dense_layers(hf, config.num_layers))
    indexer = read_indexer(hf, indexing_layers(hf, config.num_layers), interleaved=True)
    still = _still_layers(hf, config.num_layers)
    return replace(
        config,
        moe=replace(moe, normalize=True),
        latent=replace(config.latent, norm_eps=config.rms_norm_eps),
        indexer=replace(indexer, own_queries=True),
        still_layers=still,
        sources=_sources(hf, config.num_layers, still),
        learned_growth=True,
        logits_softcap=hf["final_logit_softcapping"],
    )


def _still_layers(hf: HfConfig, num_layers: int) -> frozenset[int]:
    """Return the layers that do not rotate; a list has 1 for those that do."""
    listed, every = hf.get("no_rope_layers"), hf.get("no_rope_layer_interval") or 4
    if listed is None:
        listed = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if len(listed) < num_layers:
        raise ValueError(f"no_rope_layers of {num_layers} layers: {listed}")
    return frozenset(layer for layer in range(num_layers) if not listed[layer])


def _sources(hf: HfConfig, num_layers: int, still: frozenset[int]) -> tuple[int, ...]:
    """Return whose latents each layer attends to; empty if all have their own.

    transformers takes those of the last layer that shares any, among those that rotate, or that do not.
    """
    sources = tuple(hf.get("kv_source_layers") or ())
    if sources == tuple(range(num_layers)):
        return ()
    sharing = [layer for layer in range(len(sources)) if layer in sources[layer + 1 :]]
    for layer, source in enumerate(sources):
        alike = [each for each in sharing if each < layer and (each in still) == (layer in still)]
        if source != layer and alike[-1:] != [source]:
            raise ConfigError(
                f"{hf.model_id}: kv_source_layers has {source} for layer {layer}, which is not the last one to share "
                "latents among those that rotate as it does"
            )
    return sources


def _placement(config: ModelConfig) -> Iterator[Placed]:
    return ((_own_name(name), pieces) for name, pieces in _usual_placement(config))


def _own_name(name: str) -> str:
    for usual, own in NAMES:
        name = name.replace(usual, own)
    return name


def _usual_placement(config: ModelConfig) -> Iterator[Placed]:
    """Yield where tensors go, named as in DeepSeek V3.2."""
    assert config.indexer is not None
    yield from placement.embeddings(config)
    for layer in range(config.num_layers):
        yield from placement.norms(config, layer)
        yield from placement.latent_attention(config, layer)
        yield from _growth(f"{layer}.growth", f"model.layers.{layer}.self_attn.", config.num_heads, Split.ROWS)
        yield from moe_placement(config, layer)
    for layer in config.indexer.layers:
        yield from placement.indexer(config, layer)
        prefix = f"model.layers.{layer}.self_attn.indexer."
        yield from _growth(f"{layer}.index_growth", prefix, config.indexer.num_heads, Split.NONE)


def _growth(target: str, prefix: str, num_heads: int, split: Split) -> Iterator[Placed]:
    yield whole(f"{prefix}ssmax_scaling.s", f"{target}_scale", (num_heads,), split)
    yield whole(f"{prefix}ssmax_scaling.b", f"{target}_bias", (num_heads,), split)


def _with_alpha(config: ModelConfig, alpha: Array) -> ModelConfig:
    """Return `config` with each frequency of the rotation times `exp(alpha)`."""
    rope = config.rope
    if alpha.shape != (rope.dim // 2,):
        raise ConfigError(f"{config.model_id}: {ALPHA} is {alpha.shape}, not of {rope.dim // 2} frequencies")
    stretched = np.array(rope.divisors or (1.0,) * len(alpha)) / np.exp(alpha.astype(np.float64))
    return replace(config, rope=replace(rope, divisors=tuple(stretched.tolist())))


MISTRAL_LARGE4 = placement.Family(
    "MistralLarge4ForConditionalGeneration",
    _read,
    _placement,
    not_read=lambda _: (*OTHERS, ALPHA),
    learned=ALPHA,
    with_learned=_with_alpha,
)
