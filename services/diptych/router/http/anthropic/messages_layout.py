"""How an answer of /v1/messages looks: Anthropic's message, whole or as its events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NotRequired

import orjson
from typing_extensions import TypedDict

from diptych.generation.finish import Finish
from diptych.router.http.exchange.layout import NAMED, Json, Layout
from diptych.router.http.exchange.timings import timings
from diptych.router.http.fields.blocks import Block, Blocks, Change, Closed, Grown, Opened
from diptych.router.values.output import End, Output, Piece, Usage
from diptych.router.values.request import new_answer_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ContentBlock(TypedDict):
    """Text, thinking, or the use of a tool; which, says its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]  # of thinking: empty
    id: NotRequired[str]  # of the use of a tool, as the next two
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Stop(TypedDict):
    """Why a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class Message(Stop):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    diptych: NotRequired[dict[str, Any]]


_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageLayout(Layout):
    """One message of the assistant."""

    framing = NAMED

    def __init__(self, model_id: str, max_tokens: int) -> None:
        self._model_id = model_id
        self._max_tokens = max_tokens  # that the client allowed
        self._blocks = Blocks()
        self._end: End | None = None

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Message:
        (output,) = outputs
        self._blocks.push(output.parts)
        content = [_block(block, block.text) for block in self._blocks.all]
        message = self._message(content, self._stop(output.end), _usage(usage))
        if output.end.report is not None:
            message["diptych"] = timings(output.end.report)
        return message

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        changes = self._blocks.push(piece.parts)
        if piece.end is not None:
            changes += self._blocks.close()
            self._end = piece.end
        return [*(self._start() if is_first else ()), *map(_event, changes)]

    def closing(self, usage: Usage) -> list[Json]:
        assert self._end is not None, "a stream ends with its last piece"
        last: Json = {"type": "message_delta", "delta": self._stop(self._end), "usage": _usage(usage)}
        if self._end.report is not None:
            last["diptych"] = timings(self._end.report)
        return [last, {"type": "message_stop"}]

    def _start(self) -> list[Json]:
        """How much of the prompt was cached comes with the end: it is known then."""
        nothing: Stop = {"stop_reason": None, "stop_sequence": None}
        usage = Usage(sum(map(len, self.prompts)), 0, 0)
        return [{"type": "message_start", "message": self._message([], nothing, _usage(usage))}]

    def _message(self, content: list[ContentBlock], stop: Stop, usage: MessageUsage) -> Message:
        return {
            "id": new_answer_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "content": content,
            "stop_reason": stop["stop_reason"],
            "stop_sequence": stop["stop_sequence"],
            "usage": usage,
        }

    def _stop(self, end: End) -> Stop:
        return {"stop_reason": self._stop_reason(end), "stop_sequence": end.stop or None}

    def _stop_reason(self, end: End) -> StopReason:
        if end.stop:
            return "stop_sequence"
        if end.finish is Finish.LENGTH:
            is_full = end.usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        return "tool_use" if self._blocks.has_calls else "end_turn"


def _block(block: Block, text: str) -> ContentBlock:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> Json:
    """The object that the model wrote; none when it wrote something else, as when its output was cut off."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(change: Change) -> Json:
    index = change.block.index
    match change:
        case Opened(block):
            return {"type": "content_block_start", "index": index, "content_block": _block(block, "")}
        case Grown(block, text):
            kind, name = _DELTAS[block.kind]
            return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}
        case Closed():
            return {"type": "content_block_stop", "index": index}


def _usage(usage: Usage) -> MessageUsage:
    """Anthropic counts what was read from the cache beside the input, not in it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
