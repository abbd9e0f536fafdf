"""Contents of messages that have images among their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.strict_model import ConversationPart
from diptych.router.http.fields.text_parts import TextPart, joined
from diptych.router.text.content_parts import content_of
from diptych.router.values.images import ImageInput, image_at
from diptych.router.values.validation import MAX_PARTS

Detail = Literal["auto", "low", "high", "original"]  # low: few pixels are enough; of the others none changes anything
NO_FILES: Final = "images of uploaded files are not taken by this server: send the image itself, as a data URL"


class ImageUrl(ConversationPart):
    """Where an image is, or in a data URL the image."""

    url: str
    detail: Detail | None = None


class ImagePart(ConversationPart):
    """An image among the texts of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _texts_or_parts(content: object) -> object:
    """Return the text of parts that are text, and the others as they are."""
    if isinstance(content, list) and len(content) <= MAX_PARTS and any(map(_is_image, content)):
        return [_part(part) for part in content]
    if not isinstance(content, str | list | None):
        raise ValueError(f"content is a text, or a list of parts, not {type(content).__name__}")
    return joined(content)


ChatContent = Annotated[
    str | list[TextPart | ImagePart] | None,
    BeforeValidator(_texts_or_parts, json_schema_input_type=str | list[TextPart | ImagePart] | None),
]


def chat_content(content: str | Sequence[TextPart | ImagePart], param: str) -> Any:
    """Return what `content_of` makes of it. Raises `InvalidRequest`."""
    if isinstance(content, str):
        return content
    return content_of(
        [part.text if isinstance(part, TextPart) else _image_of(part.image_url, param) for part in content]
    )


def image_of(url: str | None, file_id: str | None, detail: Detail | None, param: str) -> ImageInput:
    """Raises `InvalidRequest`."""
    if url is None:
        words = NO_FILES if file_id is not None else "an image needs its image_url"
        raise InvalidRequest(words, param=param)
    return image_at(url, param, is_small=detail == "low")


def _image_of(said: ImageUrl, param: str) -> ImageInput:
    return image_of(said.url, None, said.detail, param)


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _part(part: object) -> TextPart | ImagePart:
    if not _is_image(part):
        return TextPart(type="text", text=str(joined([part])))
    assert isinstance(part, dict)
    said = part.get("image_url")
    url, detail = (said.get("url"), said.get("detail")) if isinstance(said, dict) else (said, None)
    if not isinstance(url, str):
        raise ValueError("an image_url needs a string 'url'")
    if detail not in (None, "auto", "low", "high", "original"):
        raise ValueError(f"the detail of an image is auto, low, high or original, not {detail!r}")
    return ImagePart(type="image_url", image_url=ImageUrl(url=url, detail=detail))
