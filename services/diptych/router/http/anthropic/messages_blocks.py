"""The content blocks of an Anthropic message, and the turns of a chat that they are to a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from diptych.router.http.fields.strict_model import Said
from diptych.router.serve.validation import MAX_PARTS

Turn = dict[str, Any]


def _blocks(content: object) -> object:
    """Text is short for one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Block(Said):
    """What every block may have."""

    cache_control: dict[str, Any] | None = None  # without effect: what can be cached always is


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Any = None  # without effect


_Count = Field(max_length=MAX_PARTS, fail_fast=True)
TextBlocks = Annotated[list[TextBlock], _Count, BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]


class ThinkingBlock(Block):
    """What the model thought, as this API said it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # without effect


class ToolUseBlock(Block):
    """A call of a tool, as this API said it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None  # without effect


class ToolResultBlock(Block):
    """What a tool has answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)
    is_error: bool | None = None  # without effect: the content should say it


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Blocks = Annotated[list[AnyBlock], _Count, BeforeValidator(_blocks, json_schema_input_type=str | list[AnyBlock])]


def joined(blocks: Iterable[AnyBlock]) -> str:
    """Return all their text."""
    return "".join([block.text for block in blocks if isinstance(block, TextBlock)])


def turns_of_user(content: Sequence[AnyBlock], tool_names: Mapping[str, str]) -> list[Turn]:
    """Return a turn for each answer of a tool, and one for the text between them."""
    turns: list[Turn] = []
    for is_text, run in groupby(content, lambda block: isinstance(block, TextBlock)):
        if is_text:
            turns.append({"role": "user", "content": joined(run)})
        else:
            turns += [_turn_of_tool(block, tool_names) for block in run if isinstance(block, ToolResultBlock)]
    return turns


def turn_of_assistant(content: Sequence[AnyBlock]) -> Turn:
    turn: Turn = {"role": "assistant", "content": joined(content)}
    thoughts = "".join([block.thinking for block in content if isinstance(block, ThinkingBlock)])
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [_call(block) for block in content if isinstance(block, ToolUseBlock)]
    return {**turn, "tool_calls": calls} if calls else turn


def _turn_of_tool(block: ToolResultBlock, tool_names: Mapping[str, str]) -> Turn:
    turn = {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}
    name = tool_names.get(block.tool_use_id)
    return {**turn, "name": name} if name else turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
