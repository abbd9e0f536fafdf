"""Which block a layer looks back with: attention, or one for each kind of `Recurrent.mixer`."""

from __future__ import annotations

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import DeltaNet, KimiDelta, Mamba2, ShortConv
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.attention import AttentionBlock, Projections, StateMixer
from diptych.engine.models.layers.latent_attention import LatentAttentionBlock
from diptych.engine.models.layers.recurrent.delta_net import DeltaNetBlock
from diptych.engine.models.layers.recurrent.gated_conv import GatedConvBlock
from diptych.engine.models.layers.recurrent.kimi_delta import KimiDeltaBlock
from diptych.engine.models.layers.recurrent.mamba2 import Mamba2Block
from diptych.engine.models.matrices.weights import Weights


def new_attention(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Projections | None:
    """Build the block of `layer`, which is not recurrent; None if it does not look back."""
    if not config.looks_back(layer):
        return None
    return (LatentAttentionBlock if config.latent else AttentionBlock).build(config, weights, ops, layer)


def new_mixer(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> StateMixer:
    """Build the block of `layer`, which is recurrent."""
    assert config.recurrent is not None
    match config.recurrent.mixer:
        case DeltaNet():
            return DeltaNetBlock.build(config, weights, ops, layer)
        case KimiDelta():
            return KimiDeltaBlock.build(config, weights, ops, layer)
        case Mamba2():
            return Mamba2Block.build(config, weights, ops, layer)
        case ShortConv():
            return GatedConvBlock.build(config, weights, ops, layer)
