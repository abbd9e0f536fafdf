"""Contents of turns that have images among their texts. Pure.

From a client's message to the chat's prompt an image is in its turn; a chat template sees that there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diptych.router.values.images import ImageInput

Turn = dict[str, Any]


def content_of(parts: Sequence[str | ImageInput]) -> Any:
    """Return a content as turns have it: text; where there is an image, parts."""
    if not any(isinstance(part, ImageInput) for part in parts):
        return "".join([part for part in parts if isinstance(part, str)])
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]


def without_images(turns: Iterable[Turn]) -> tuple[list[Turn], list[ImageInput]]:
    """Return turns as chat templates know them, which see that there are images; and these, in order."""
    shown: list[Turn] = []
    images: list[ImageInput] = []
    for turn in turns:
        content = turn["content"]
        if isinstance(content, str):
            shown.append(turn)
            continue
        images += [part["image"] for part in content if part["type"] == "image"]
        parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
        shown.append({**turn, "content": parts})
    return shown, images
