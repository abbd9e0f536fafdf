"""Images as clients give them: the bytes of a file, or where it is. Nothing of them has been looked at yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from diptych.common.errors import InvalidRequest

MAX_URL_LEN: Final = 8192  # characters, of an image that is elsewhere
_WEB: Final = ("http://", "https://")
_DATA: Final = "data:"
_BASE64: Final = ";base64"
_HEAD_LEN: Final = 256  # characters of a data URL in which its comma is looked for


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a prompt."""

    param: str  # the field of the request that it is in
    file: bytes | str = field(default=b"", repr=False)  # a str: in base64
    url: str = ""  # where it is instead
    is_small: bool = False  # few pixels are enough, says the client


def image_at(url: str, param: str, *, is_small: bool = False) -> ImageInput:
    """Return the image that a URL names or is. Raises `InvalidRequest`."""
    head = url[:_HEAD_LEN].lower()
    if head.startswith(_DATA):
        return ImageInput(param, file=_data_of(url, head, param), is_small=is_small)
    if not head.startswith(_WEB):
        raise InvalidRequest("the URL of an image begins with data:, http:// or https://", param=param)
    if len(url) > MAX_URL_LEN:
        raise InvalidRequest(f"the URL of an image has at most {MAX_URL_LEN} characters", param=param)
    return ImageInput(param, url=url, is_small=is_small)


def image_or_file(text: str, param: str) -> ImageInput:
    """Return the image that a text is: a URL, or a file in base64. Raises `InvalidRequest`."""
    if text[:_HEAD_LEN].lower().startswith((_DATA, *_WEB)):
        return image_at(text, param)
    return ImageInput(param, file=text)


def _data_of(url: str, head: str, param: str) -> str:
    kind, comma, _ = head.removeprefix(_DATA).partition(",")
    if not (comma and kind.startswith("image/") and kind.endswith(_BASE64)):
        words = "a data URL of an image begins with data:image/png;base64, (or jpeg, webp, gif)"
        raise InvalidRequest(words, param=param)
    return url[url.index(",") + 1 :]
