"""How a model wants images: what size they are scaled to, how many places of a prompt one takes, what stands around it.

Source of the rule of sizes: `smart_resize` of Qwen's image processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from diptych.common.errors import ConfigError, InvalidRequest

MAX_ASPECT: Final = 200  # of the longer side to the shorter one
CHANNELS: Final = 3
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
MIN_PIXELS: Final = 56 * 56  # where a checkpoint says nothing
MAX_PIXELS: Final = 28 * 28 * 1280
MOST_PIXELS: Final = 1 << 26  # that any model may ask for


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A special token that stands for images, or beside them."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class VisionInput:
    """What an image is to be when it reaches a model's tower."""

    patch_size: int  # pixels of a patch's side
    merge_size: int  # patches of a side that become one place of the prompt
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]  # of red, green and blue from 0 to 1; the tower subtracts it
    image_std: tuple[float, float, float]  # and divides by it
    start: Placeholder  # a chat template writes start, pad and end for an image;
    pad: Placeholder  # the content takes the place of pad
    end: Placeholder

    @property
    def step(self) -> int:
        """Heights and widths are multiples of so many pixels."""
        return self.patch_size * self.merge_size

    def at_most(self, num_pixels: int) -> VisionInput:
        """Return the same with images of no more pixels, as far as the model takes so few."""
        return replace(self, max_pixels=max(min(self.max_pixels, num_pixels), self.min_pixels, self.step**2))

    def tokens_of(self, height: int, width: int) -> int:
        """Return how many places an image takes. Raises `InvalidRequest` for a size that `scaled` doesn't return."""
        step = self.step
        if height < step or width < step or height % step or width % step:
            raise InvalidRequest(f"an image's height and width are multiples of {step}, not {height} and {width}")
        if height * width > self.max_pixels:
            raise InvalidRequest(f"an image has at most {self.max_pixels} pixels, not {height} times {width}")
        return (height // step) * (width // step)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is scaled to: about its shape, within the bounds of pixels.

        Raises `InvalidRequest` for one that is too long for its width, or has no pixel.
        """
        if min(height, width) < 1 or max(height, width) > MAX_ASPECT * min(height, width):
            words = (
                f"an image's longer side is at most {MAX_ASPECT} times its shorter one, not {height} by {width} pixels"
            )
            raise InvalidRequest(words)
        step = self.step
        near = round(height / step) * step, round(width / step) * step
        if near[0] * near[1] > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            return self._bounded(_at_least(step, height / factor), _at_least(step, width / factor))
        if near[0] * near[1] < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            return self._bounded(math.ceil(height * factor / step) * step, math.ceil(width * factor / step) * step)
        return near

    def _bounded(self, height: int, width: int) -> tuple[int, int]:
        """Cut the longer side where whole steps have made the image larger than it may be."""
        if height * width <= self.max_pixels:
            return height, width
        longer = self.max_pixels // min(height, width) // self.step * self.step
        return (height, longer) if height <= width else (longer, width)


def _at_least(step: int, size: float) -> int:
    return max(step, math.floor(size / step) * step)


def qwen_input(values: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionInput:
    """Read what Qwen's models say: `config.json`, its `vision_config`, and `preprocessor_config.json`.

    Raises `ConfigError` for what makes no sense.
    """
    size, patch, merge = processor.get("size") or {}, int(vision["patch_size"]), int(vision["spatial_merge_size"])
    given = (processor.get("patch_size", patch), processor.get("merge_size", merge))
    if given != (patch, merge):
        raise ConfigError(f"preprocessor_config.json has patches of {given}, but the tower of {(patch, merge)}")
    _refuse_odd(processor)
    read = VisionInput(
        patch_size=patch,
        merge_size=merge,
        min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS),
        max_pixels=int(processor.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS),
        image_mean=_three(processor.get("image_mean", CLIP_MEAN)),
        image_std=_three(processor.get("image_std", CLIP_STD)),
        start=Placeholder(int(values["vision_start_token_id"]), "<|vision_start|>"),
        pad=Placeholder(int(values["image_token_id"]), "<|image_pad|>"),
        end=Placeholder(int(values["vision_end_token_id"]), "<|vision_end|>"),
    )
    if not 0 < read.step**2 <= read.max_pixels <= MOST_PIXELS or not 0 < read.min_pixels <= read.max_pixels:
        raise ConfigError(
            f"images of {read.min_pixels} to {read.max_pixels} pixels in steps of {read.step} make no sense"
        )
    return read


def _refuse_odd(processor: Mapping[str, Any]) -> None:
    for key in ("do_rescale", "do_normalize", "do_resize"):
        if processor.get(key, True) is not True:
            raise ConfigError(f"preprocessor_config.json: {key}={processor[key]!r} is not supported")
    factor = processor.get("rescale_factor", 1 / 255)
    if abs(factor * 255 - 1) > 1e-6:
        raise ConfigError(f"preprocessor_config.json: rescale_factor={factor!r} is not supported; 1/255 is")


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue
