"""What models with a tower say of themselves and of images: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.architectures.registry import from_hf
from diptych.architectures.tower import Sections
from diptych.architectures.vision import CLIP_MEAN, VisionInput, gemma3_input, qwen_input
from diptych.checkpoints.hf_folder import read_config
from diptych.common.errors import ConfigError, InvalidRequest

TOWER: dict[str, Any] = {  # of Qwen2.5-VL 7B, as its folder says it
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "temporal_patch_size": 2,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 152064,
    "vision_config": TOWER,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
PROCESSOR: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}


def vision(**said: Any) -> VisionInput:
    return qwen_input(QWEN, TOWER, PROCESSOR | said)


def test_a_published_configuration_is_read_with_what_its_folder_says_of_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"image_mean": [0.5, 0.5, 0.5]}))
    config = read_config(tmp_path)
    assert config.vision == vision(image_mean=[0.5, 0.5, 0.5])
    assert config.mrope == Sections((16, 24, 24))
    assert config.rope.theta == 1e6
    assert config.attending.rope.is_still
    assert config.tower is not None
    assert (config.tower.window, config.tower.full_layers) == (4, frozenset({7, 15, 23, 31}))
    assert vision().image_mean == CLIP_MEAN
    assert [each.text for each in (vision().start, vision().pad, vision().end)] == [
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    ]


def test_newer_folders_say_it_in_one_file_for_all_processors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    said = {"size": {"shortest_edge": 784, "longest_edge": 78400}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": said}))
    found = read_config(tmp_path).vision
    assert found is not None
    assert (found.min_pixels, found.max_pixels) == (784, 78400)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "does not share 64 pairs"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "mrope_section=None"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24], "mrope_interleaved": True}}, "mrope_interleaved=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"vision_config": TOWER | {"hidden_act": "gelu"}}, "hidden_act='gelu' of vision_config"),
        ({"vision_config": TOWER | {"in_chans": 4}}, "in_chans=4 of vision_config"),
        ({"vision_config": TOWER | {"depth": 1 << 20}}, "depth of vision_config must be 1 to 256"),
        ({"vision_config": TOWER | {"out_hidden_size": 2048}}, "rows of 2048 are no hidden states of 3584"),
        ({"vision_config": TOWER | {"num_heads": 7}}, "7 heads do not share 1280"),
        ({"vision_config": TOWER | {"fullatt_block_indexes": [32]}}, "layers that are none of its 32"),
    ],
)
def test_what_no_layer_computes_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hf(QWEN | said, {}, "a model")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"patch_size": 16}, "patches of"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"rescale_factor": 1.0}, "rescale_factor=1.0"),
        ({"max_pixels": 1 << 40}, "make no sense"),
        ({"min_pixels": 1 << 25}, "make no sense"),
    ],
)
def test_what_a_processor_says_and_no_tower_expects_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vision(**said)


@pytest.mark.parametrize(
    ("size", "scaled"),  # by transformers' `smart_resize`
    [
        ((28, 28), (56, 56)),
        ((480, 640), (476, 644)),
        ((1080, 1920), (1092, 1932)),
        ((10, 1000), (28, 560)),
        ((7, 5), (84, 56)),
        ((6000, 8000), (3080, 4116)),
        ((70, 98), (56, 112)),  # halves are rounded to even
    ],
)
def test_images_are_scaled_as_the_model_s_own_processor_does(size: tuple[int, int], scaled: tuple[int, int]) -> None:
    assert vision().scaled(*size) == scaled
    assert vision().tokens_of(*scaled) == scaled[0] * scaled[1] // 784


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_whatever_is_scaled_has_places(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequest, match="at most 200 times"):
            vision().scaled(height, width)
        return
    assert vision().tokens_of(*vision().scaled(height, width)) >= 1


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not 0 by 5 pixels"):
        vision().scaled(0, 5)


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([784, 3136, 10_000, 1 << 20]))
def test_whatever_an_image_is_scaled_to_is_taken(height: int, width: int, most: int) -> None:
    """Whole steps of a strip, or of what is made larger, may not come to more than is taken."""
    few = vision(min_pixels=784, max_pixels=12845056).at_most(most)
    if max(height, width) <= 200 * min(height, width):
        assert few.tokens_of(*few.scaled(height, width)) >= 1


def test_who_shows_fewer_pixels_shows_what_the_model_takes_all_the_same() -> None:
    few = vision().at_most(1 << 20)
    height, width = few.scaled(6000, 8000)
    assert 0.9 * (1 << 20) < height * width <= 1 << 20
    assert vision().tokens_of(height, width) == few.tokens_of(height, width)  # workers know nothing of it
    assert few.scaled(480, 640) == vision().scaled(480, 640)
    assert vision().at_most(1).max_pixels == vision().min_pixels
    assert vision().at_most(1 << 30) == vision()


SIGLIP: dict[str, Any] = {  # of Gemma 3 4B, as its folder says it
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": SIGLIP,
}
GEMMA_PROCESSOR: dict[str, Any] = {
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_seq_length": 256,
    "resample": 2,
    "size": {"height": 896, "width": 896},
}


def test_gemma_3_makes_a_square_of_256_places_of_every_image(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR))
    config = read_config(tmp_path)
    assert config.vision == from_hf(GEMMA, {}, "gemma").vision
    assert config.vision is not None
    assert config.sees_images_whole
    for height, width in ((896, 896), (10, 2000), (4000, 3000)):
        assert config.vision.at_most(1).scaled(height, width) == (896, 896)
    assert config.vision.tokens_of(896, 896) == 256
    with pytest.raises(InvalidRequest, match="an image has 896 by 896 pixels, not 896 and 448"):
        config.vision.tokens_of(896, 448)
    assert config.vision.extremes == ((896, 896), (896, 896))
    assert config.vision.resampling == "bilinear"
    tower = config.tower
    assert tower is not None
    assert (tower.merge_size, tower.num_positions, tower.head_dim, tower.out_size) == (4, 4096, 72, 2560)
    assert vision().extremes == ((28, 28), (3584, 3584))


def test_what_transformers_processor_puts_around_an_image_of_gemma_3_stands_in_its_prompt() -> None:
    """Chat templates write the first token of these alone."""
    found = gemma3_input(GEMMA, SIGLIP, GEMMA_PROCESSOR)
    text = "<start_of_turn>user\n<start_of_image>What?"
    framed = found.framed(text)
    assert framed == "<start_of_turn>user\n\n\n<start_of_image><image_soft_token><end_of_image>\n\nWhat?"
    assert found.framed(framed) == framed
    assert found.marks == ("<image_soft_token>", "<start_of_image>")
    assert [each.token_id for each in (found.start, found.pad, found.end)] == [255999, 262144, 256000]
    assert vision().framed(text) == text


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"vision_config": SIGLIP | {"hidden_act": "gelu"}}, "hidden_act='gelu' of vision_config"),
        ({"vision_config": SIGLIP | {"layer_norm_eps": 1e-5}}, "layer_norm_eps=1e-05 of vision_config"),
        ({"vision_config": SIGLIP | {"num_hidden_layers": 1 << 20}}, "num_hidden_layers of vision_config must be 1 to"),
        ({"vision_config": SIGLIP | {"image_size": 900}}, "images of 900 pixels in patches of 14"),
        ({"mm_tokens_per_image": 255}, "mm_tokens_per_image=255 are no square that 64 by 64 patches come to"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image=9 are no square that 64 by 64 patches come to"),
    ],
)
def test_what_no_layer_of_gemma_3_s_tower_computes_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hf(GEMMA | said, {}, "a model")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan=True"),
        ({"size": {"height": 224, "width": 224}}, "but the tower of 896 by 896"),
        ({"resample": 1}, "resample=1 is not supported"),
        ({"do_resize": False}, "do_resize=False"),
    ],
)
def test_what_gemma_3_s_processor_says_and_its_tower_does_not_expect_is_refused(
    said: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        gemma3_input(GEMMA, SIGLIP, GEMMA_PROCESSOR | said)
