"""Kimi K2.5 and later: DeepSeek V3 that knows images and videos, served for text. What looks at them is not read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import DEEPSEEK_V3, latent_placement, layers_behind
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Named, Placed
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

TEXTS: Final = ("deepseek_v3", "kimi_k2")  # one thing: the second is the name of Kimi's own code
OUTER: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
IGNORED: Final = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "media_placeholder_token_id",
    "video_placeholder",
    "use_unified_vision_chunk",
    "ignore_index",
    "projection_hidden_size",
    "projection_layer_norm_eps",
)
PREFIX: Final = "language_model."
IMAGES: Final = ("vision_tower.", "mm_projector.", "model.mm_projector.")
BLOCKS: Final = (
    f"{PREFIX}model.blocks."  # as transformers saves the layers of the text, too: it takes them for a tower's
)


def _read(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore(*IGNORED)
    text: dict[str, Any] = {key: hf.get(key) for key in OUTER if key in hf} | hf["text_config"]
    kind = text.get("model_type", TEXTS[0])
    if kind not in TEXTS:
        raise ConfigError(f"{hf.model_id}: text_config of model_type {kind} is not supported; {TEXTS[0]} is")
    text.pop("quantization_config", None)  # it is about files
    return replace(hf.part(text, DEEPSEEK_V3.read), architecture="kimi_k25")


def _placement(config: ModelConfig) -> Iterator[Placed]:
    return ((PREFIX + name, pieces) for name, pieces in latent_placement(config))


def _not_read(config: ModelConfig) -> tuple[str, ...]:
    return (*IMAGES, *(PREFIX + name for name in layers_behind(config)), f"{BLOCKS}{config.num_layers}.")


def _renamed(config: ModelConfig, named: Named) -> Iterator[Named]:
    name, tensor = named
    yield name.replace(BLOCKS, f"{PREFIX}model.layers."), tensor


KIMI_K25 = Family(
    "Kimi_K25ForConditionalGeneration",
    _read,
    _placement,
    not_read=_not_read,
    unstack=_renamed,
    aliases=("KimiK25ForConditionalGeneration",),
)
