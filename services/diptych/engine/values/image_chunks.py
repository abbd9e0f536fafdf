"""Where chunks of prompts with images end: how much a step encodes, and whether an image may be cut. Pure."""

from __future__ import annotations

import enum
from typing import Final

from diptych.engine.values.request import Request

STEP_PIXELS: Final = 1 << 20  # of images that a step encodes together; one image may have more


class ImageCuts(enum.Enum):
    """Where a chunk may end in a prompt with images."""

    ANYWHERE = "anywhere"
    BESIDE = "beside"  # in front of an image or behind it: its rows see each other


def len_beside_images(request: Request, start: int, end: int) -> int:
    """Return how long a chunk is that would go to `end` if it could end inside an image."""
    for content in request.contents:
        if content.image is not None and content.start < end < content.end:
            return (content.start if content.start > start else content.end) - start
    return end - start


def num_pixels(request: Request, start: int, num_tokens: int) -> int:
    """Return the pixels of the images of which a chunk computes some: they may have to be encoded for it."""
    if request.encodes is not None and request.encodes.image is not None:
        return request.encodes.image.height * request.encodes.image.width
    inside = (each for each in request.contents if each.start < start + num_tokens and each.end > start)
    return sum(each.image.height * each.image.width for each in inside if each.image is not None)


def len_of_images(request: Request, start: int) -> int:
    """Return how long a chunk may be: of one image, or of several that have few pixels together."""
    pixels = 0
    for content in request.contents:
        if content.end > start and content.image is not None:
            pixels += content.image.height * content.image.width
            if pixels > STEP_PIXELS and content.start > start and num_pixels(request, start, content.start - start):
                return content.start - start
    return request.num_tokens - start
