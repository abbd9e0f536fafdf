"""Gemma 3: Gemma 2 with normed queries and keys, and another rotary embedding where a window slides.

Models that know images are served for text: the tower that looks at images is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.gemma2 import gemma, gemma_placement
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Placed

logger = logging.getLogger(__name__)

TEXT_DEFAULTS: Final[dict[str, Any]] = {  # what published files of models with images leave out
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262_208,
}
TEXT: Final = "language_model."
IMAGES: Final = ("vision_tower.", "multi_modal_projector.")


def _read(hf: HfConfig) -> ModelConfig:
    config = gemma(hf, hf.shared("gemma3_text", theta=1_000_000.0, tied=True))
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    local = [layer for layer in range(config.num_layers) if (layer + 1) % period]
    local_rope = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta, window = hf.get("rope_local_base_freq") or 10_000.0, hf.get("sliding_window", 4096)
    if hf.get("use_bidirectional_attention") and window:
        window = window // 2 + 1  # to either side
    return replace(
        config,
        qk_norm="heads",
        windows=hf.windows(window, local),
        local_rope=hf.rope({"rope_theta": theta, **local_rope}, config.head_dim, theta),
        attention_softcap=hf.get("attn_logit_softcapping") or 0.0,
        logits_softcap=hf.get("final_logit_softcapping") or 0.0,
    )


def _read_with_images(hf: HfConfig) -> ModelConfig:
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    outer = {key: hf.get(key) for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in hf}
    return replace(hf.part(TEXT_DEFAULTS | outer | hf["text_config"], _read), architecture="gemma3")


def _placement_with_images(config: ModelConfig) -> Iterator[Placed]:
    return ((TEXT + name, pieces) for name, pieces in gemma_placement(config))


GEMMA3_TEXT = Family("Gemma3ForCausalLM", _read, gemma_placement)
GEMMA3 = Family("Gemma3ForConditionalGeneration", _read_with_images, _placement_with_images, not_read=lambda _: IMAGES)
