"""From the bytes of an image's file to its pixels as a model wants them. Blocks: run it in a thread.

First the head is read, which says how many pixels there are: so a small file that would fill the memory is refused
before it does. Then the pixels are made, upright as the camera was held, the first frame of several, on white where
they let something through, and scaled as the model's own processor does it: bicubic, on whole numbers.
Between the two only the file is kept, as it came: what Pillow makes of it lives no longer than the work of one thread.
Rule: whatever a file is made of, it becomes an image or an `InvalidRequest`. Pillow's readers raise all sorts of errors
for broken files.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import string
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL import Image as pillow

from diptych.architectures.vision import Resampling, VisionInput
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
MAX_SCANS: Final = 100  # of a progressive JPEG, each of which goes over all pixels
USUAL_SCANS: Final = 10  # that cameras and programs make: taken in any case
SCANNED_PIXELS: Final = 1 << 29  # scans times pixels, beyond the usual scans
TEXT_BYTES: Final = 4 << 20  # of comments of a PNG, inflated: they are read before its size is known
BAND_PIXELS: Final = 1 << 20  # put on white at once: Pillow keeps Python's lock meanwhile
BASE64_PIECE: Final = 1 << 20  # characters, made into bytes at once: likewise; a multiple of 4
_SPACES: Final = string.whitespace.encode()
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
PngImagePlugin.MAX_TEXT_MEMORY = TEXT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """An image whose head was read, and none of its pixels."""

    height: int  # as it will be
    width: int
    param: str
    file: bytes | str  # as it was given
    turn: pillow.Transpose | None
    num_steps: int  # pixels that are gone over to decode it
    resampling: Resampling = "bicubic"

    @property
    def num_bytes(self) -> int:
        """The numbers of its scaled pixels."""
        return CHANNELS * self.height * self.width


@dataclass(frozen=True, slots=True)
class ReadImage:
    """Pixels, and what they are called."""

    image: Image
    digest: bytes


def open_image(given: ImageInput, file: bytes | str, vision: VisionInput, limits: ImageLimits) -> OpenedImage:
    """Read the head of a file; a str is one in base64. Raises `InvalidRequest`."""
    num_bytes = len(file) if isinstance(file, bytes) else len(file) // 4 * 3 - 2  # before as much is made of it
    _check_bytes(num_bytes, given.param, limits)
    data = _bytes_of(file, given.param)
    _check_bytes(len(data), given.param, limits)
    with _open(data, given.param) as source:
        width, height = source.size
        if width * height > limits.pixels:
            words = f"an image has {width} times {height} pixels: at most {limits.pixels} are taken, so make it smaller"
            raise InvalidRequest(words, param=given.param)
        num_scans = _num_scans(source, data, given.param)
        orientation = _orientation(source)
    num_steps = num_scans * width * height
    if orientation in _ON_THEIR_SIDE:
        width, height = height, width
    wanted = vision.at_most(SMALL_PIXELS) if given.is_small else vision
    height, width = _scaled(wanted, height, width, given.param)
    return OpenedImage(height, width, given.param, file, _UPRIGHT.get(orientation), num_steps, vision.resampling)


def read_image(opened: OpenedImage) -> ReadImage:
    """Make the pixels. Raises `InvalidRequest`."""
    try:
        with pillow.open(io.BytesIO(_bytes_of(opened.file, opened.param)), formats=FORMATS) as source:
            upright = _rgb(source)
        if opened.turn is not None:
            upright = upright.transpose(opened.turn)
        how = pillow.Resampling[opened.resampling.upper()]
        pixels = upright.resize((opened.width, opened.height), how).tobytes()
    except Exception as error:
        raise _unreadable(opened.param) from error
    image = Image(opened.height, opened.width, pixels)
    return ReadImage(image, digest_of(image))


def digest_of(image: Image) -> bytes:
    """Return what names an image's pixels."""
    head = b"image" + struct.pack("<II", image.height, image.width)
    return hashlib.sha256(head + image.rgb).digest()


def _bytes_of(file: bytes | str, param: str) -> bytes:
    if isinstance(file, bytes):
        return file
    try:
        text = file.encode("ascii")
        if any(space in text for space in _SPACES):
            text = b"".join([piece.translate(None, _SPACES) for piece in _pieces(text)])
        if 0 <= text.find(b"=") < len(text) - 2:  # the end of a piece, but not of all
            raise ValueError
        return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in _pieces(text)])
    except ValueError:  # of characters beyond ASCII, too
        raise InvalidRequest("an image is no base64", param=param) from None


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[start : start + BASE64_PIECE] for start in range(0, len(text), BASE64_PIECE))


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


def _num_scans(source: pillow.Image, data: bytes, param: str) -> int:
    """Return how often all pixels are gone over. Raises `InvalidRequest`."""
    if source.format not in ("JPEG", "MPO"):
        return 1
    num_scans, num_pixels = data.count(_SCAN), source.width * source.height
    most = max(USUAL_SCANS, min(MAX_SCANS, SCANNED_PIXELS // num_pixels))
    if num_scans > most:
        words = f"a JPEG of {num_pixels} pixels has more than {most} scans: store it again, or smaller"
        raise InvalidRequest(words, param=param)
    return max(1, num_scans)


def _orientation(source: pillow.Image) -> int:
    """Return how the camera was held; what can't be read says nothing. No pixels are read for it."""
    if not source.info.keys() & {"exif", "xmp", "Raw profile type exif"}:
        return 1
    try:
        return int(source.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


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
    return _on_white(source.convert("RGBA"))


def _on_white(image: pillow.Image) -> pillow.Image:
    """Put an image that lets something through on white, some rows at a time."""
    found = pillow.new("RGB", image.size)
    num_rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        band = image.crop((0, top, image.width, min(top + num_rows, image.height)))
        white = pillow.new("RGBA", band.size, (255, 255, 255, 255))
        found.paste(pillow.alpha_composite(white, band).convert("RGB"), (0, top))
    return found
