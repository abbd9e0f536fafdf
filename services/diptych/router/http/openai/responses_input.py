"""The input items of a response, and the turns of a chat that they are to a chat template.

Neighbouring items of the assistant (reasoning, a message, calls) are one turn, as the model made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.content_parts import Detail, image_of
from diptych.router.http.fields.strict_model import ConversationPart
from diptych.router.http.fields.tool_fields import (
    MAX_COUNT,
    Turn,
    as_parts,
    call_for_template,
    parsed_arguments,
    turn_of_assistant,
    turn_of_tool,
)
from diptych.router.http.openai.chat_request import ROLES
from diptych.router.text.content_parts import content_of, without_images
from diptych.router.values.images import ImageInput
from diptych.router.values.validation import MAX_MESSAGES

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(ConversationPart):
    """Text that was sent, or that this API said."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None  # without effect
    logprobs: Any = None  # likewise


class ImagePart(ConversationPart):
    """An image that was sent."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None  # refused
    detail: Detail | None = None

    def image(self) -> ImageInput:
        """Raises `InvalidRequest`."""
        return image_of(self.image_url, self.file_id, self.detail, "input")


AnyPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[AnyPart], MAX_COUNT, BeforeValidator(as_parts, json_schema_input_type=str | list[AnyPart])]


class SentItem(ConversationPart):
    """What every item may have, without effect."""

    id: str | None = None
    status: Status | None = None


class InputMessage(SentItem):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: str | None = None  # without effect


class FunctionCall(SentItem):
    """A call of a function, as this API said it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(SentItem):
    """What a function has answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningText(ConversationPart):
    """A part of what the model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(SentItem):
    """What the model thought, as this API said it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], MAX_COUNT] | None = None
    # without effect
    summary: Annotated[list[ReasoningText], MAX_COUNT] | None = None
    encrypted_content: str | None = None


def _kind(item: object) -> str:
    """A message need not say that it is one."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(kind)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _items(value: object) -> object:
    """Text is short for one message of the user."""
    if not isinstance(value, str | list):
        raise ValueError("input should be a text, or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1),
]


def turns_of(items: Sequence[Item], instructions: str | None) -> tuple[list[Turn], list[ImageInput]]:
    """Return the turns of a chat, and its images. Raises `InvalidRequest`."""
    turns: list[Turn] = [{"role": "system", "content": instructions}] if instructions else []
    names = {item.call_id: item.name for item in items if isinstance(item, FunctionCall)}
    shown = [item for item in items if not isinstance(item, ReasoningItem) or item.content]
    for is_assistants, group in groupby(shown, _is_assistants):
        run = list(group)
        turns += [_turn_of_assistant(run)] if is_assistants else _turns_of_others(run, names)
    return without_images(turns)


def _is_assistants(item: Item) -> bool:
    if isinstance(item, InputMessage):
        return item.role == "assistant"
    return not isinstance(item, FunctionCallOutput)


def _turn_of_assistant(items: Sequence[Item]) -> Turn:
    text = "".join([_joined(item.content) for item in items if isinstance(item, InputMessage)])
    thoughts = "".join([_joined(item.content or ()) for item in items if isinstance(item, ReasoningItem)])
    calls = [_call(item) for item in items if isinstance(item, FunctionCall)]
    return turn_of_assistant(text, thoughts, calls)


def _turns_of_others(items: Iterable[Item], names: Mapping[str, str]) -> Iterator[Turn]:
    for item in items:
        match item:
            case InputMessage():
                content = _content(item.content) if item.role == "user" else _joined(item.content)
                yield {"role": ROLES.get(item.role, item.role), "content": content}
            case FunctionCallOutput():
                yield turn_of_tool(item.call_id, _content(item.output), names)


def _call(item: FunctionCall) -> Turn:
    return call_for_template(item.call_id, item.name, parsed_arguments(item.arguments))


def _content(parts: Sequence[AnyPart]) -> Any:
    return content_of([part.text if isinstance(part, TextPart) else part.image() for part in parts])


def _joined(parts: Iterable[AnyPart | ReasoningText]) -> str:
    """Raises `InvalidRequest`."""
    return "".join([_text(part) for part in parts])


def _text(part: AnyPart | ReasoningText) -> str:
    if isinstance(part, ImagePart):
        raise InvalidRequest("a message may have images if its role is user, and no other", param="input")
    return part.text
