"""How a model wants images: what size they are scaled to, how many places of a prompt one takes, what stands around it.

Source of the rule of sizes: `smart_resize` of Qwen's image processors. Gemma 3 makes a square of any image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from diptych.common.errors import ConfigError, InvalidRequest

MAX_ASPECT: Final = 200  # of the longer side to the shorter one
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALVES: Final = (0.5, 0.5, 0.5)
MIN_PIXELS: Final = 56 * 56  # where a checkpoint says nothing
MAX_PIXELS: Final = 28 * 28 * 1280
MOST_PIXELS: Final = 1 << 26  # that any model may ask for
Resampling = Literal["bicubic", "bilinear"]
_RESAMPLINGS: Final[Mapping[int, Resampling]] = {2: "bilinear", 3: "bicubic"}  # numbers of `PIL.Image.Resampling`


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
    side: int = 0  # pixels of the square that every image is scaled to; 0: it keeps its shape
    resampling: Resampling = "bicubic"
    is_whole: bool = False  # the rows of an image see each other, in front and behind: one step computes them all
    frame: str = ""  # a prompt has this where a chat template writes `start` alone; empty: it writes all three

    @property
    def step(self) -> int:
        """Heights and widths are multiples of so many pixels."""
        return self.patch_size * self.merge_size

    @property
    def extremes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The heights and widths of the smallest image and of one of the largest."""
        if self.side:
            return (self.side, self.side), (self.side, self.side)
        height = max(self.step, math.isqrt(self.max_pixels) // self.step * self.step)
        width = max(self.step, self.max_pixels // height // self.step * self.step)
        return (self.step, self.step), (height, width)

    @property
    def marks(self) -> tuple[str, ...]:
        """What stands for an image in what a chat template has written."""
        return (self.pad.text, self.start.text) if self.frame else (self.pad.text,)

    def framed(self, text: str) -> str:
        """Return a text as the model is to see it that has, for each image, what chat templates write.

        One that has `pad` already is framed by whoever wrote it.
        """
        return text.replace(self.start.text, self.frame) if self.frame and self.pad.text not in text else text

    def at_most(self, num_pixels: int) -> VisionInput:
        """Return the same with images of no more pixels, as far as the model takes so few."""
        return replace(self, max_pixels=max(min(self.max_pixels, num_pixels), self.min_pixels, self.step**2))

    def tokens_of(self, height: int, width: int) -> int:
        """Return how many places an image takes. Raises `InvalidRequest` for a size that `scaled` doesn't return."""
        step = self.step
        if self.side and (height, width) != (self.side, self.side):
            raise InvalidRequest(f"an image has {self.side} by {self.side} pixels, not {height} and {width}")
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
        if self.side:
            return self.side, self.side
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


def gemma3_input(values: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionInput:
    """Read what Gemma 3 says: `config.json`, its `vision_config`, and `preprocessor_config.json`.

    Raises `ConfigError` for what makes no sense, and for images that are to be cut up beside the whole.
    """
    side, patch, tokens = (
        int(vision["image_size"]),
        int(vision["patch_size"]),
        int(values.get("mm_tokens_per_image", 256)),
    )
    patches, rows = side // patch, math.isqrt(tokens)
    if patches < 1 or side != patches * patch or side * side > MOST_PIXELS:
        raise ConfigError(f"vision_config: images of {side} pixels in patches of {patch} make no sense")
    if rows < 1 or tokens != rows**2 or patches % rows:
        raise ConfigError(f"mm_tokens_per_image={tokens} are no square that {patches} by {patches} patches come to")
    _refuse_odd(processor)
    if processor.get("do_pan_and_scan"):
        raise ConfigError("preprocessor_config.json: do_pan_and_scan=True is not supported")
    size = processor.get("size") or {"height": side, "width": side}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ConfigError(f"preprocessor_config.json has images of {dict(size)}, but the tower of {side} by {side}")
    resample = processor.get("resample", 2)
    if resample not in _RESAMPLINGS:
        raise ConfigError(f"preprocessor_config.json: resample={resample!r} is not supported; 2 and 3 are")
    start = Placeholder(int(values.get("boi_token_index", 255_999)), "<start_of_image>")
    pad = Placeholder(int(values.get("image_token_index", 262_144)), "<image_soft_token>")
    end = Placeholder(int(values.get("eoi_token_index", 256_000)), "<end_of_image>")
    return VisionInput(
        patch_size=patch,
        merge_size=patches // rows,
        min_pixels=side * side,
        max_pixels=side * side,
        image_mean=_three(processor.get("image_mean", HALVES)),
        image_std=_three(processor.get("image_std", HALVES)),
        start=start,
        pad=pad,
        end=end,
        side=side,
        resampling=_RESAMPLINGS[resample],
        is_whole=True,
        frame=f"\n\n{start.text}{pad.text}{end.text}\n\n",
    )


READERS: Final = {
    "gemma3": gemma3_input,
    "qwen2_5_vl": qwen_input,
    "qwen3_vl": qwen_input,
}  # by `ModelConfig.architecture`


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
