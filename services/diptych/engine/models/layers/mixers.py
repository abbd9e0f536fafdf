"""Which block a recurrent layer has: one for each kind of `Recurrent.mixer`."""

from __future__ import annotations

from diptych.architectures.config import ModelConfig
from diptych.engine.models.layers.attention import StateMixer
from diptych.engine.models.layers.delta_net import DeltaNetBlock
from diptych.engine.models.ops import Ops
from diptych.engine.models.weights import Weights


def new_mixer(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> StateMixer:
    """Build the block of `layer`, which is recurrent."""
    assert config.recurrent is not None
    return DeltaNetBlock.build(config, weights, ops, layer)
