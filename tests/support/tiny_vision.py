"""Tiny random models that see images: as folders, and as transformers computes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from diptych.common.arrays import I64
from diptych.generation.segments import ContentSegment, Image, prompt_keys

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
Prompt = Sequence[int | Pixels]  # tokens, and images between them

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
ENDS, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD = range(256, 256 + len(SPECIAL))
VOCAB_SIZE: Final = 272
PATCH, MERGE = 4, 2
STEP: Final = PATCH * MERGE  # pixels of a place
SQUARE: Final = 4  # places of a side of Gemma 3's images
TEMPLATE: Final = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' or part.type == 'image_url' or 'image' in part %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROCESSOR: Final = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 64 * STEP**2,
    "min_pixels": 4 * STEP**2,
    "merge_size": MERGE,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
}
TEXT: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": ENDS,
}
TOWER: Final = {"hidden_size": 48, "intermediate_size": 64, "num_heads": 3, "depth": 3, "out_hidden_size": 64}
TOWER_SHAPE: Final = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
TOKENS: Final[dict[str, Any]] = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VOCAB_SIZE - 1,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


@dataclass(frozen=True)
class VisionModel:
    """A random model as transformers saved it, and itself."""

    folder: Path
    theirs: Any

    def logits(self, prompt: Prompt) -> Any:
        """Return `[num_places, vocab_size]` as transformers computes them."""
        import torch

        images = [each for each in prompt if not isinstance(each, int)]
        ids = [token for each in prompt for token in ([each] if isinstance(each, int) else [IMAGE_PAD] * places(each))]
        seen = self._seen(images, torch.tensor([[int(token == IMAGE_PAD) for token in ids]])) if images else {}
        with torch.inference_mode():
            self.theirs.model.rope_deltas = None
            return self.theirs(torch.tensor([ids]), use_cache=False, **seen).logits[0]

    def _seen(self, images: Sequence[Pixels], are_places: Any) -> dict[str, Any]:
        import torch

        grids = [[1, each.shape[0] // PATCH, each.shape[1] // PATCH] for each in images]
        patches = torch.from_numpy(np.concatenate([_patches(each) for each in images]))
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": are_places}

    def greedy(self, prompt: Prompt, num_tokens: int) -> list[int]:
        """Return the tokens that transformers generates."""
        text = list(prompt)
        for _ in range(num_tokens):
            text.append(int(self.logits(text)[-1].argmax()))
        return [token for token in text[len(prompt) :] if isinstance(token, int)]


@dataclass(frozen=True)
class Gemma3Model(VisionModel):
    """All images are squares of `SQUARE` places."""

    def _seen(self, images: Sequence[Pixels], are_places: Any) -> dict[str, Any]:
        import torch

        normed = np.stack([_normed(each) for each in images])
        return {"pixel_values": torch.from_numpy(normed), "token_type_ids": are_places}


def save_gemma3(folder: Path, **others: Any) -> VisionModel:
    """Windows are smaller than an image; the last layers are one that sees all, and one with a window."""
    import transformers

    text = {**TEXT, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11}
    text |= {"rope_parameters": None, "sliding_window_pattern": 3, **others}
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_hidden_layers": 2}
    vision |= {"image_size": SQUARE * STEP, "patch_size": PATCH}
    tokens: dict[str, Any] = {
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "image_token_index": IMAGE_PAD,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=SQUARE**2, **tokens)
    model = saved(folder, transformers.Gemma3ForConditionalGeneration, config)
    given = {key: PROCESSOR[key] for key in ("do_normalize", "do_rescale", "do_resize", "image_mean", "image_std")}
    given |= {"size": {"height": SQUARE * STEP, "width": SQUARE * STEP}, "do_pan_and_scan": None, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    return Gemma3Model(folder, model.theirs)


def save_qwen2_5_vl(folder: Path, **text: Any) -> VisionModel:
    """One layer of its tower sees all, the others see windows of two by two places. `text`: other settings of it."""
    import transformers

    vision = {**TOWER, **TOWER_SHAPE, "window_size": 2 * STEP, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, **text}, vision_config=vision, **TOKENS)
    return saved(folder, transformers.Qwen2_5_VLForConditionalGeneration, config)


def save_qwen3_vl(folder: Path, **others: Any) -> VisionModel:
    """Rows of its tower's first and last layers are added behind the first two layers of the text."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 3, 3], "mrope_interleaved": True}
    text = {**TEXT, "num_hidden_layers": 4, "head_dim": 20, "rope_parameters": rope, **others}
    vision = {**TOWER, **TOWER_SHAPE, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return saved(folder, transformers.Qwen3VLForConditionalGeneration, config)


def saved(folder: Path, kind: Any, config: Any) -> VisionModel:
    """Norms and biases are random as well, and weights large enough for an image to matter."""
    import torch

    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2 if parameter.dim() == 1 else 0.09)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data -= 1.0
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return VisionModel(folder, model)


def _save_tokenizer(folder: Path) -> None:
    """A token for each byte, and the special ones."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))


def picture(seed: int, rows: int, columns: int) -> Pixels:
    """Return an image of so many places."""
    return np.random.default_rng(seed).integers(0, 256, (rows * STEP, columns * STEP, 3), dtype=np.uint8)


def places(image: Pixels) -> int:
    height, width, _ = map(int, image.shape)
    return height // STEP * (width // STEP)


def contents_of(prompt: Prompt, *, with_pixels: bool = True) -> tuple[ContentSegment, ...]:
    """Return the images of a prompt as a router sends them."""
    found, start = [], 0
    for each in prompt:
        if isinstance(each, int):
            start += 1
            continue
        (height, width, _), rgb = each.shape, each.tobytes()
        named = b"image" + height.to_bytes(4, "little") + width.to_bytes(4, "little") + rgb
        image = Image(height, width, rgb if with_pixels else b"")
        found.append(ContentSegment(start, places(each), hashlib.sha256(named).digest(), image))
        start = found[-1].end
    return tuple(found)


def keys_of(prompt: Prompt) -> I64:
    """Return what stands at each place of a prompt."""
    return prompt_keys(np.array([each for each in prompt if isinstance(each, int)], np.int64), contents_of(prompt))


def _patches(image: Pixels) -> npt.NDArray[np.float32]:
    """Return an image as transformers' processor of Qwen's models gives it: `[num_patches, 3 * 2 * PATCH * PATCH]`."""
    normed = _normed(image)
    rows, columns = image.shape[0] // STEP, image.shape[1] // STEP
    parted = normed.reshape(3, rows, MERGE, PATCH, columns, MERGE, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
    doubled = np.repeat(parted[:, :, :, :, :, None], 2, axis=5)
    return np.ascontiguousarray(doubled.reshape(rows * columns * MERGE**2, -1))


def _normed(image: Pixels) -> npt.NDArray[np.float32]:
    """Return `[3, height, width]`."""
    mean, std = (np.array(PROCESSOR[name], np.float32) for name in ("image_mean", "image_std"))
    return ((image.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1).astype(np.float32)
