"""Files of images, as clients send them; and how a small model wants images."""

from __future__ import annotations

import base64
import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image as pillow

from diptych.architectures.vision import Placeholder, VisionInput
from diptych.router.images.limits import ImageLimits

VISION: Final = VisionInput(
    patch_size=4,
    merge_size=2,
    min_pixels=4 * 64,
    max_pixels=64 * 64,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    start=Placeholder(257, "<|vision_start|>"),
    pad=Placeholder(258, "<|image_pad|>"),
    end=Placeholder(259, "<|vision_end|>"),
)
SPECIAL: Final = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # behind 256, the end
LIMITS: Final = ImageLimits(num_images=4, file_bytes=1 << 20, pixels=1 << 20, request_bytes=1 << 20)


def picture(width: int = 32, height: int = 24, seed: int = 0, mode: str = "RGB") -> pillow.Image:
    """Return random pixels."""
    num_channels = {"RGB": 3, "RGBA": 4, "L": 1, "CMYK": 4}[mode]
    values = np.random.default_rng(seed).integers(0, 256, width * height * num_channels, dtype=np.uint8)
    return pillow.frombytes(mode, (width, height), values.tobytes())


def file_of(image: pillow.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def anthropic_image(file: bytes) -> Any:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def scaled_by_transformers(image: pillow.Image, vision: VisionInput) -> npt.NDArray[np.uint8]:
    """Return the pixels that transformers' processor of Qwen's models makes: `[height, width, 3]`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge = vision.patch_size, vision.merge_size
    bounds: Any = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=merge, **bounds)
    made = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
    _, rows, columns = made["image_grid_thw"][0].tolist()
    shape = rows // merge, columns // merge, merge, merge, 3, 2, patch, patch
    parts = made["pixel_values"].reshape(shape)[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    pixels: npt.NDArray[np.uint8] = parts.reshape(rows * patch, columns * patch, 3).astype(np.uint8)
    return pixels
