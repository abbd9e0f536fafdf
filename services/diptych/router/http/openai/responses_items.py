"""The items of a response: a message, reasoning, or the call of a function. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict

from diptych.router.http.fields.blocks import Block, Kind

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Type = Literal["message", "reasoning", "function_call"]

_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}
_TYPES: Final[Mapping[Kind, Type]] = {"text": "message", "reasoning": "reasoning", "call": "function_call"}


class OutputItem(TypedDict):
    """A message, reasoning, or the call of a function; which, says its type."""

    id: str
    status: Status
    type: Type
    role: NotRequired[Literal["assistant"]]  # of a message
    content: NotRequired[list[dict[str, Any]]]  # of a message or reasoning
    summary: NotRequired[list[dict[str, Any]]]  # of reasoning: there is none
    call_id: NotRequired[str]  # of a call, as the next two
    name: NotRequired[str]
    arguments: NotRequired[str]


def item_id(response_id: str, block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{response_id.removeprefix('resp_')}{block.index:04x}"


def output_item(response_id: str, block: Block, status: Status, logprobs: Sequence[Json]) -> OutputItem:
    """Return the item as it is now: one in progress shows nothing yet."""
    item: OutputItem = {"id": item_id(response_id, block), "status": status, "type": _TYPES[block.kind]}
    is_begun, text = status != "in_progress", block.text
    match block.kind:
        case "call":
            item |= {"call_id": block.call_id, "name": block.name, "arguments": text if is_begun else ""}
        case "reasoning":
            item |= {"summary": [], "content": [content_part(block, text, ())] if is_begun else []}
        case "text":
            item |= {"role": "assistant", "content": [content_part(block, text, logprobs)] if is_begun else []}
    return item


def content_part(block: Block, text: str, logprobs: Sequence[Json]) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
