"""From the bytes of an image's file to its pixels as a model wants them. Blocks: run it in a thread.

First the head is read, which says how many pixels there are: so a small file that would fill the memory is refused
before it does. Then the pixels are made, upright as the camera was held, the first frame of several, on white where
they let something through, and scaled as the model's own processor does it: bicubic, on whole numbers.
Rule: whatever a file is made of, it becomes an image or an `InvalidRequest`. Pillow's readers raise all sorts of errors
for broken files.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL import Image as pillow

from diptych.architectures.vision import VisionInput
from diptych.common.errors import InvalidRequest
from diptych.generation.segments import Image
from diptych.router.images.limits import CHANNELS, SMALL_PIXELS, ImageLimits
from diptych.router.values.images import ImageInput

READERS: Final = (
    PngImagePlugin,
    JpegImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
)  # imported: no other is ever looked for
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SCANS: Final = 100  # of a progressive JPEG, each of which goes over all pixels; cameras make about ten
_SCAN: Final = b"\xff\xda"
_ORIENTATION: Final = 0x0112  # in EXIF
_UPRIGHT: Final[Mapping[int, pillow.Transpose]] = {
    2: pillow.Transpose.FLIP_LEFT_RIGHT,
    3: pillow.Transpose.ROTATE_180,
    4: pillow.Transpose.FLIP_TOP_BOTTOM,
    5: pillow.Transpose.TRANSPOSE,
    6: pillow.Transpose.ROTATE_270,
    7: pillow.Transpose.TRANSVERSE,
    8: pillow.Transpose.ROTATE_90,
}
_ON_THEIR_SIDE: Final = frozenset({5, 6, 7, 8})


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """An image whose head was read, and none of its pixels."""

    height: int  # as it will be
    width: int
    param: str
    source: pillow.Image
    turn: pillow.Transpose | None

    @property
    def num_bytes(self) -> int:
        """Of its pixels, scaled."""
        return CHANNELS * self.height * self.width


@dataclass(frozen=True, slots=True)
class ReadImage:
    """Pixels, and what they are called."""

    image: Image
    digest: bytes


def open_image(given: ImageInput, file: bytes | str, vision: VisionInput, limits: ImageLimits) -> OpenedImage:
    """Read the head of a file; a str is one in base64. Raises `InvalidRequest`."""
    data = _from_base64(file, given.param, limits) if isinstance(file, str) else file
    _check_bytes(len(data), given.param, limits)
    source = _open(data, given.param)
    width, height = source.size
    if width * height > limits.pixels:
        words = f"an image has {width} times {height} pixels: at most {limits.pixels} are taken, so make it smaller"
        raise InvalidRequest(words, param=given.param)
    if source.format in ("JPEG", "MPO") and data.count(_SCAN) > MAX_SCANS:
        raise InvalidRequest(f"a JPEG has more than {MAX_SCANS} scans: store it again", param=given.param)
    orientation = _orientation(source)
    if orientation in _ON_THEIR_SIDE:
        width, height = height, width
    wanted = replace(vision, max_pixels=_fewer_pixels(vision)) if given.is_small else vision
    height, width = _scaled(wanted, height, width, given.param)
    return OpenedImage(height, width, given.param, source, _UPRIGHT.get(orientation))


def read_image(opened: OpenedImage) -> ReadImage:
    """Make the pixels. Raises `InvalidRequest`."""
    try:
        upright = _rgb(opened.source) if opened.turn is None else _rgb(opened.source).transpose(opened.turn)
        pixels = upright.resize((opened.width, opened.height), pillow.Resampling.BICUBIC).tobytes()
    except Exception as error:
        raise _unreadable(opened.param) from error
    image = Image(opened.height, opened.width, pixels)
    return ReadImage(image, digest_of(image))


def digest_of(image: Image) -> bytes:
    """Return what names an image's pixels."""
    head = b"image" + struct.pack("<II", image.height, image.width)
    return hashlib.sha256(head + image.rgb).digest()


def _from_base64(text: str, param: str, limits: ImageLimits) -> bytes:
    _check_bytes(len(text) // 4 * 3 - 2, param, limits)  # before as much is made of it
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError:  # of characters beyond ASCII, too
        raise InvalidRequest("an image is no base64", param=param) from None


def _check_bytes(num_bytes: int, param: str, limits: ImageLimits) -> None:
    if num_bytes > limits.file_bytes:
        words = f"an image's file has more than {limits.file_bytes} bytes: make it smaller"
        raise InvalidRequest(words, param=param)


def _open(data: bytes, param: str) -> pillow.Image:
    try:
        return pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise InvalidRequest("an image has far too many pixels: make it smaller", param=param) from None
    except Exception as error:
        raise _unreadable(param) from error


def _unreadable(param: str) -> InvalidRequest:
    words = "an image can't be read: send a whole file that is PNG, JPEG, WebP or GIF"
    return InvalidRequest(words, param=param)


def _orientation(source: pillow.Image) -> int:
    """Return how the camera was held; what can't be read says nothing. No pixels are read for it."""
    if not source.info.keys() & {"exif", "xmp", "Raw profile type exif"}:
        return 1
    try:
        return int(source.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _fewer_pixels(vision: VisionInput) -> int:
    return max(min(vision.max_pixels, SMALL_PIXELS), vision.min_pixels)


def _scaled(vision: VisionInput, height: int, width: int, param: str) -> tuple[int, int]:
    try:
        return vision.scaled(height, width)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from None


def _rgb(source: pillow.Image) -> pillow.Image:
    """Decode the first frame."""
    source.load()
    if source.mode.startswith("I"):  # of 16 bits, of which Pillow would cut the upper ones off
        return pillow.fromarray((np.asarray(source) >> 8).astype(np.uint8)).convert("RGB")
    if not source.has_transparency_data:
        return source.convert("RGB")
    white = pillow.new("RGBA", source.size, (255, 255, 255, 255))
    white.alpha_composite(source.convert("RGBA"))
    return white.convert("RGB")
