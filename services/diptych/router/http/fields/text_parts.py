"""Text that clients write in parts, and what they think that an answer will be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from diptych.router.http.fields.strict_model import ConversationPart, StrictModel
from diptych.router.values.validation import MAX_PARTS


class TextPart(ConversationPart):
    """A piece of the content of a message."""

    type: Literal["text"]
    text: str


def joined(content: object) -> object:
    """Return the text of `content` given in parts; the type is checked afterwards."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_PARTS:
        raise ValueError(f"content takes at most {MAX_PARTS} parts, not {len(content)}")
    return "".join(_text_of(part) for part in content)


def _text_of(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"content parts must be of type 'text', not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("a text part needs a string 'text'")
    return text


class PredictionFields(StrictModel):
    """What the answer will be, for the most part."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(joined, json_schema_input_type=str | list[TextPart])]


def predicted_text(prediction: PredictionFields | None) -> str:
    """Return what an answer will be; empty: nobody said."""
    return "" if prediction is None else prediction.content
