"""Gemma 3: Gemma 2 with normed queries and keys, and another rotary embedding where a window slides.

Models that know images have a tower of SigLIP's kind. An image is 256 rows, which see each other in the text's layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.gemma2 import gemma, gemma_placement
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Named, Placed
from diptych.architectures.tower import Tower
from diptych.architectures.tower_placement import PROJECTION, PROJECTOR, SIGLIP, TURNED, gemma3_tower
from diptych.architectures.vision import VisionInput, gemma3_input
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

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
TOWER: Final = "vision_tower."
VISION_KEYS: Final = (
    *("vision_config", "mm_tokens_per_image"),
    *("boi_token_index", "eoi_token_index", "image_token_index"),
)
COMPUTED: Final[dict[str, tuple[Any, ...]]] = {  # by the tower's layers; the first is what is not said
    "hidden_act": ("gelu_pytorch_tanh",),
    "layer_norm_eps": (1e-6,),
    "num_channels": (3,),
}
SIZES: Final = {
    "num_hidden_layers": 1 << 8,
    "hidden_size": 1 << 14,
    "intermediate_size": 1 << 16,
    "num_attention_heads": 1 << 8,
    "image_size": 1 << 13,
    "patch_size": 1 << 8,
}


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
    hf.ignore(*VISION_KEYS)
    outer = {key: hf.get(key) for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in hf}
    text = hf.part(TEXT_DEFAULTS | outer | hf["text_config"], _read)
    said: Mapping[str, Any] = hf["vision_config"]
    _check_tower(said, hf.model_id)
    vision = gemma3_input(hf, said, {})
    tower = _tower(said, vision, text.hidden_size)
    tower.validate(text.hidden_size)
    return replace(text, architecture="gemma3", tower=tower, vision=vision)


def _check_tower(said: Mapping[str, Any], model_id: str) -> None:
    """Raise `ConfigError` for what no tower is, or what its layers do not compute."""
    for key, most in SIZES.items():
        if type(said.get(key)) is not int or not 0 < said[key] <= most:
            raise ConfigError(f"{model_id}: {key} of vision_config must be 1 to {most}, not {said.get(key)!r:.40}")
    for key, computed in COMPUTED.items():
        if said.get(key, computed[0]) not in computed:
            raise ConfigError(f"{model_id}: {key}={said[key]!r} of vision_config is not supported")


def _tower(said: Mapping[str, Any], vision: VisionInput, out_size: int) -> Tower:
    return Tower(
        num_layers=said["num_hidden_layers"],
        hidden_size=said["hidden_size"],
        num_heads=said["num_attention_heads"],
        ffn_size=said["intermediate_size"],
        out_size=out_size,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        num_frames=0,
        activation="gelu_tanh",
        gated=False,
        num_positions=(vision.side // vision.patch_size) ** 2,
        rotates=False,
        is_averaged=True,
    )


def _placement_with_images(config: ModelConfig) -> Iterator[Placed]:
    assert config.tower is not None
    yield from ((TEXT + name, pieces) for name, pieces in gemma_placement(config))
    yield from gemma3_tower(config.tower)


def _turned(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield a tensor by its published name; newer programs leave a part of it out.

    The one behind the tower has a row for what it computes, in place of a column.
    """
    name, tensor = named
    if name.startswith(TOWER) and not name.startswith(SIGLIP):
        name = name.replace(TOWER, SIGLIP, 1)
    if name != f"{PROJECTOR}{PROJECTION}":
        yield name, tensor
        return
    if isinstance(tensor, QuantizedArray) or tensor.ndim != 2:
        raise ConfigError(f"{config.model_id}: {name} is no plain matrix")
    yield f"{PROJECTOR}{TURNED}", tensor.T


GEMMA3_TEXT = Family("Gemma3ForCausalLM", _read, gemma_placement)
GEMMA3 = Family(
    "Gemma3ForConditionalGeneration",
    _read_with_images,
    _placement_with_images,
    not_read=lambda _: (f"{SIGLIP}head.", f"{TOWER}head."),
    unstack=_turned,
)
