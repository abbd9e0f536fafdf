"""Qwen2.5-VL: Qwen 2.5 whose queries and keys rotate by time, height and width, and a tower that sees by windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Named, Placed
from diptych.architectures.tower import MAX_SIZES, Sections, Tower
from diptych.architectures.tower_placement import qwen2_5_tower
from diptych.architectures.vision import qwen_input
from diptych.common.errors import ConfigError

VISION_KEYS: Final = ("vision_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
TOKEN_KEYS: Final = ("image_token_id", "video_token_id")  # of videos nothing is read
OUTER: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
TEXT: Final = "model.language_model."
PARTS: Final = (TEXT, "model.visual.")


def _read(hf: HfConfig) -> ModelConfig:
    hf.ignore(*VISION_KEYS, *TOKEN_KEYS)
    tower = read_tower(hf)
    config, sections = read_text(hf, _read_text, takes_turns=False)
    tower.validate(config.hidden_size)
    return replace(config, tower=tower, mrope=sections, vision=qwen_input(hf, hf["vision_config"], {}))


def _read_text(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "use_sliding_window": (False,)})
    hf.ignore("sliding_window", "max_window_layers", "layer_types")
    return replace(hf.shared("qwen2_5_vl", theta=1_000_000.0), qkv_bias=True)


def read_text(
    hf: HfConfig, read: Callable[[HfConfig], ModelConfig], *, takes_turns: bool
) -> tuple[ModelConfig, Sections]:
    """Read the text's part, by `read`, and how it rotates; `takes_turns`: see `Sections`."""
    said = _said_of_text(hf)
    rope = {**(said.pop("rope_parameters", None) or said.pop("rope_scaling", None) or {})}
    sizes, turns = rope.pop("mrope_section", None), rope.pop("mrope_interleaved", takes_turns)
    if sizes is None or bool(turns) is not takes_turns:
        raise ConfigError(f"{hf.model_id}: mrope_section={sizes!r}, mrope_interleaved={turns!r} are not supported")
    kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
    config = hf.part({**said, "rope_parameters": rope | kinds}, read)
    time, height, width = map(int, sizes)
    if min(time, height, width) < 0 or 2 * (time + height + width) != config.rope.dim:
        raise ConfigError(f"{hf.model_id}: mrope_section {sizes} does not share {config.rope.dim // 2} pairs")
    return config, Sections((time, height, width), takes_turns)


def _said_of_text(hf: HfConfig) -> dict[str, Any]:
    """Return what older files say beside `vision_config`, and newer ones in a part of its own."""
    text = hf.get("text_config")
    if text is None:
        return {key: hf[key] for key in hf if key not in (*VISION_KEYS, *TOKEN_KEYS)}
    return {**{key: hf.get(key) for key in OUTER if key in hf}, **text}


def read_tower(hf: HfConfig) -> Tower:
    """Read `vision_config`. Raises `ConfigError` for what the tower's layers do not compute."""
    said: Mapping[str, Any] = hf["vision_config"]
    check_tower(said, hf.model_id)
    if said.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{hf.model_id}: hidden_act={said['hidden_act']!r} of vision_config is not supported")
    patch, merge = said["patch_size"], said["spatial_merge_size"]
    return Tower(
        num_layers=said["depth"],
        hidden_size=said["hidden_size"],
        num_heads=said["num_heads"],
        ffn_size=said["intermediate_size"],
        out_size=said["out_hidden_size"],
        patch_size=patch,
        merge_size=merge,
        num_frames=said.get("temporal_patch_size", 2),
        activation="silu",
        gated=True,
        window=said["window_size"] // merge // patch,
        full_layers=frozenset(said["fullatt_block_indexes"]),
    )


def check_tower(said: Mapping[str, Any], model_id: str) -> None:
    """Raise `ConfigError` for sizes that are larger than any tower's, and for images that are not red, green, blue."""
    for key, most in MAX_SIZES.items():
        if type(said.get(key)) is not int or not 0 < said[key] <= most:
            raise ConfigError(f"{model_id}: {key} of vision_config must be 1 to {most}, not {said.get(key)!r:.40}")
    for key in ("in_channels", "in_chans"):
        if said.get(key, 3) != 3:
            raise ConfigError(f"{model_id}: {key}={said[key]!r} of vision_config is not supported; 3 are")


def place(config: ModelConfig) -> Iterator[Placed]:
    """Yield the text's tensors, and the tower's."""
    assert config.tower is not None
    yield from text_placement(config)
    yield from qwen2_5_tower(config.tower)


def text_placement(config: ModelConfig) -> Iterator[Placed]:
    """Yield the text's tensors by the names that newer programs give them; adapters have these, too."""
    for name, pieces in placement.llama(config):
        yield name.replace("model.", TEXT, 1) if name.startswith("model.") else name, pieces


def renamed(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield a tensor by its newer name: the first checkpoints had the text where models without images have it."""
    name, tensor = named
    if name.startswith("visual."):
        name = f"model.{name}"
    elif name.startswith("model.") and not name.startswith(PARTS):
        name = name.replace("model.", TEXT, 1)
    yield name, tensor


QWEN2_5_VL = placement.Family("Qwen2_5_VLForConditionalGeneration", _read, place, unstack=renamed)
