"""Mistral Small 3.1 and later, Ministral 3, Mistral Small 4: models of Mistral's that know images, served for text.

What looks at images is not read. The text's part of the configuration says of which family it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.ministral3 import MINISTRAL3
from diptych.architectures.families.dense.mistral import MISTRAL
from diptych.architectures.families.latent.deepseek_v3 import latent_placement
from diptych.architectures.families.latent.mistral4 import MISTRAL4, unstack
from diptych.architectures.hf_config import HfConfig
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

TEXTS: Final = {"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4}
TEXT_DEFAULTS: Final[dict[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2}
OUTER: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
IGNORED: Final = (
    "vision_config",
    "image_token_index",
    "image_token_id",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)
PREFIX: Final = "language_model."
IMAGES: Final = ("vision_tower.", "multi_modal_projector.")


def _read(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore(*IGNORED)
    text, outer = hf["text_config"], {key: hf.get(key) for key in OUTER if key in hf}
    kind = text.get("model_type", "mistral")
    if kind not in TEXTS:
        known = ", ".join(TEXTS)
        raise ConfigError(f"{hf.model_id}: text_config of model_type {kind} is not supported; {known} are")
    return replace(hf.part(TEXT_DEFAULTS | outer | text, TEXTS[kind].read), architecture="mistral3")


def _placement(config: ModelConfig) -> Iterator[placement.Placed]:
    placed = placement.llama(config) if config.latent is None else latent_placement(config)
    return ((PREFIX + name, pieces) for name, pieces in placed)


MISTRAL3 = placement.Family(
    "Mistral3ForConditionalGeneration", _read, _placement, not_read=lambda _: IMAGES, unstack=unstack
)
