"""One layer of a decoder: its parts, as the configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.attention import Projections, StateMixer
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.dense_beside_moe import DenseBesideMoe
from diptych.engine.models.layers.latent_attention import DecompressedBlock, LatentAttentionBlock
from diptych.engine.models.layers.layer_end import LayerEnd
from diptych.engine.models.layers.mixers import new_attention, new_mixer
from diptych.engine.models.layers.mlp import FeedForward, Mlp
from diptych.engine.models.layers.moe import MoeBlock
from diptych.engine.models.layers.norm import Norm, RmsNorm, new_norm
from diptych.engine.models.layers.query_growth import Growth, new_growth
from diptych.engine.models.layers.spread_mlp import SpreadMlp
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import Operation


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer and the norms around its two blocks."""

    attention: Projections | None
    mixer: StateMixer | None  # `attention` again, in a recurrent layer
    growth: Growth | None
    attention_post_norm: Tensor | None  # of what attention adds
    ffn_norm: Norm | None  # of what goes into the feed-forward network behind attention
    ffn: FeedForward | None
    ffn_post_norm: Tensor | None
    next_norm: Norm | None  # the next layer's input norm; the last layer's is the model's; behind a stage none
    end: LayerEnd | None  # that norms in place of `next_norm`
    made: DecompressedBlock | None = None  # `attention` again, where keys and values are made of latents

    def project_in(self, buffers: Buffers) -> None:
        """See `Projections`."""
        if self.attention is not None:
            self.attention.project_in(buffers)

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        """See `FeedForward`."""
        return () if self.ffn is None else self.ffn.serve_others(nothing)

    def decompressed(self) -> Layer:
        """Return the layer with keys and values made of latents, if it can be."""
        made = self.attention.decompressed() if isinstance(self.attention, LatentAttentionBlock) else None
        return self if made is None else replace(self, attention=made, made=made)


def new_layer(config: ModelConfig, weights: Weights, ops: Ops, index: int) -> Layer:
    """Return the layer `index` of a model."""
    is_last = index == config.num_layers - 1
    name = "norm" if is_last else f"{index + 1}.input_norm"
    has_next = config.has_last_layer if is_last else config.pre_norms  # the next stage has that of its first layer
    next_norm = new_norm(config, weights, ops, name) if has_next else None
    end = None
    if config.layer_scales:
        of_next = None if next_norm is None else weights.norm(name)
        end, next_norm = LayerEnd.build(config, weights, ops, index, of_next), None
    mixer = new_mixer(config, weights, ops, index) if config.is_recurrent(index) else None
    is_whole = config.looks_back(index) and config.has_ffn(index)
    return Layer(
        attention=mixer or new_attention(config, weights, ops, index),
        mixer=mixer,
        growth=new_growth(config, weights, index, weights.device),
        attention_post_norm=weights.norm(f"{index}.attention_post_norm") if config.post_norms else None,
        ffn_norm=_ffn_norm(config, weights, ops, index) if is_whole else None,
        ffn=_ffn(config, ops, index).build(config, weights, ops, index) if config.has_ffn(index) else None,
        ffn_post_norm=weights.norm(f"{index}.ffn_post_norm") if config.post_norms else None,
        next_norm=next_norm,
        end=end,
    )


def _ffn(config: ModelConfig, ops: Ops, layer: int) -> type[Mlp | SpreadMlp | MoeBlock | DenseBesideMoe]:
    """In a model with experts these are what schedulers share, and each has the networks of other layers."""
    if not config.is_moe(layer):
        return Mlp if ops.ranks.experts is None or config.has_experts else SpreadMlp
    return DenseBesideMoe if config.moe is not None and config.moe.beside_dense else MoeBlock


def _ffn_norm(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Norm | None:
    if _ffn(config, ops, layer) is DenseBesideMoe:  # which has a norm for each of its parts
        return RmsNorm(ops, torch.ones_like(weights.norm(f"{layer}.dense_norm")), config.rms_norm_eps)
    return new_norm(config, weights, ops, f"{layer}.ffn_norm") if config.pre_norms else None
