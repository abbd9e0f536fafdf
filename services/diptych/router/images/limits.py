"""What images may cost a router. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SMALL_PIXELS: Final = 512 * 512  # of an image of which few details are wanted
MOST_PIXELS: Final = 89_478_485  # of a file: beyond, Pillow warns of a bomb
PIXELS_TOGETHER: Final = 1 << 24  # of the images of one prompt, scaled: 48 MiB, and a message to a worker holds 64
CHANNELS: Final = 3


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one request may bring."""

    num_images: int
    file_bytes: int  # of one
    pixels: int  # of one, before it is scaled
    request_bytes: int  # of all that a request sends to workers: pixels, once for each output
