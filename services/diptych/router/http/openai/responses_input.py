"""The input items of a response, and the turns of a chat that they are to a chat template.

Neighbouring items of the assistant (reasoning, a message, calls) are one turn, as the model made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from diptych.router.http.fields.strict_model import Said
from diptych.router.http.fields.tool_fields import CalledFunction, CallFields
from diptych.router.http.openai.chat_request import ROLES, call_for_template
from diptych.router.serve.validation import MAX_MESSAGES, MAX_PARTS

Turn = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


def _parts(content: object) -> object:
    """Text is short for one part."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class TextPart(Said):
    """Text that was sent, or that this API said."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None  # without effect
    logprobs: Any = None  # likewise


_Count = Field(max_length=MAX_PARTS, fail_fast=True)
Parts = Annotated[list[TextPart], _Count, BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]


class InputMessage(Said):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    # without effect
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(Said):
    """A call of a function, as this API said it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    # without effect
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Said):
    """What a function has answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    # without effect
    id: str | None = None
    status: Status | None = None


class ReasoningText(Said):
    """A part of what the model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Said):
    """What the model thought, as this API said it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], _Count] | None = None
    # without effect
    id: str | None = None
    status: Status | None = None
    summary: Annotated[list[ReasoningText], _Count] | None = None
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
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1),
]


def turns_of(items: Sequence[Item], instructions: str | None) -> list[Turn]:
    turns: list[Turn] = [{"role": "system", "content": instructions}] if instructions else []
    names = {item.call_id: item.name for item in items if isinstance(item, FunctionCall)}
    shown = [item for item in items if not isinstance(item, ReasoningItem) or item.content]
    for is_assistants, group in groupby(shown, _is_assistants):
        run = list(group)
        turns += [_turn_of_assistant(run)] if is_assistants else _turns_of_others(run, names)
    return turns


def _is_assistants(item: Item) -> bool:
    if isinstance(item, InputMessage):
        return item.role == "assistant"
    return not isinstance(item, FunctionCallOutput)


def _turn_of_assistant(items: Sequence[Item]) -> Turn:
    turn: Turn = {"role": "assistant"}
    turn["content"] = "".join([_joined(item.content) for item in items if isinstance(item, InputMessage)])
    thoughts = "".join([_joined(item.content or ()) for item in items if isinstance(item, ReasoningItem)])
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [_call(item) for item in items if isinstance(item, FunctionCall)]
    return {**turn, "tool_calls": calls} if calls else turn


def _turns_of_others(items: Iterable[Item], names: Mapping[str, str]) -> Iterator[Turn]:
    for item in items:
        match item:
            case InputMessage():
                yield {"role": ROLES.get(item.role, item.role), "content": _joined(item.content)}
            case FunctionCallOutput():
                turn = {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
                yield {**turn, "name": names[item.call_id]} if item.call_id in names else turn


def _call(item: FunctionCall) -> Mapping[str, Any]:
    function = CalledFunction(name=item.name, arguments=item.arguments)
    return call_for_template(CallFields(id=item.call_id, function=function))


def _joined(parts: Iterable[TextPart | ReasoningText]) -> str:
    return "".join([part.text for part in parts])
