"""Qwen3.5: layers as in Qwen3-Next, whose checkpoints keep what a delta net is given in tensors of their own.

Models that know images are served for text: what looks at images is not read. A text has one position for each token,
so all sections of the rotary embedding, of time, height and width, turn alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.recurrent.qwen3_next import (
    NOT_READ,
    delta_placement,
    next_name,
    unstack_gates,
    with_delta_nets,
)
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Placed

logger = logging.getLogger(__name__)

TEXT: Final = "model.language_model."
IMAGES: Final = "model.visual."
OUTER: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
IGNORED: Final = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
SECTIONS: Final = ("mrope_section", "mrope_interleaved")


def read_text(hf: HfConfig, architecture: str, ffn_key: str = "intermediate_size") -> ModelConfig:
    """Read what all models of the family have; `ffn_key`: see `HfConfig.shared`."""
    hf.refuse_unless({"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)})
    num_next = hf.get("mtp_num_hidden_layers") or 0
    if hf.get("mtp_use_dedicated_embeddings"):  # other rows than those of the model
        num_next = 0
    for key in SECTIONS:
        hf.pop_from_rope(key)
    config = hf.shared(architecture, partial_rotary_factor=0.25, ffn_key=ffn_key)
    return replace(with_delta_nets(config, hf), num_next_layers=num_next)


def read_with_images(hf: HfConfig, read: Callable[[HfConfig], ModelConfig], architecture: str) -> ModelConfig:
    """Read the text's part, by `read`, of a model that knows images."""
    logger.warning("%s: images are not supported; the model is served for text", hf.model_id)
    hf.ignore(*IGNORED)
    outer: dict[str, Any] = {key: hf.get(key) for key in OUTER if key in hf}
    return replace(hf.part(outer | hf["text_config"], read), architecture=architecture)


def placement_with_images(config: ModelConfig) -> Iterator[Placed]:
    """Yield where the text's tensors of such a model go."""
    for name, pieces in delta_placement(config):
        yield name.replace("model.", TEXT, 1) if name.startswith("model.") else name, pieces


def not_read_with_images(config: ModelConfig) -> tuple[str, ...]:
    return (*NOT_READ, IMAGES)


def next_name_with_images(config: ModelConfig, name: str) -> str | None:
    """As `next_name`, where the text's tensors are called otherwise."""
    return next_name(config, name, TEXT)


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"mlp_only_layers": ([],)})
    return read_text(hf, "qwen3_5_text")


QWEN3_5_TEXT = Family(
    "Qwen3_5ForCausalLM",
    _read,
    delta_placement,
    not_read=lambda _: NOT_READ,
    unstack=unstack_gates,
    next_name=next_name,
)
QWEN3_5 = Family(
    "Qwen3_5ForConditionalGeneration",
    lambda hf: read_with_images(hf, _read, "qwen3_5"),
    placement_with_images,
    not_read=not_read_with_images,
    unstack=unstack_gates,
    next_name=next_name_with_images,
)
