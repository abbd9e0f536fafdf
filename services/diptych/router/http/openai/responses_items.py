"""The items of a response: a message, reasoning, or the call of a function. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diptych.router.http.fields.blocks import Block

Json = dict[str, Any]

_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}


def item_id(response_id: str, block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{response_id.removeprefix('resp_')}{block.index:04x}"


def output_item(response_id: str, block: Block, status: str, logprobs: Sequence[Json]) -> Json:
    """Return the item as it is now: one in progress shows nothing yet."""
    text = "" if status == "in_progress" else block.text
    head = {"id": item_id(response_id, block), "status": status}
    match block.kind:
        case "call":
            call = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
            return {**head, **call}
        case "reasoning":
            content = [] if status == "in_progress" else [content_part(block, text, ())]
            return {**head, "type": "reasoning", "summary": [], "content": content}
        case "text":
            content = [] if status == "in_progress" else [content_part(block, text, logprobs)]
            return {**head, "type": "message", "role": "assistant", "content": content}


def content_part(block: Block, text: str, logprobs: Sequence[Json]) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
