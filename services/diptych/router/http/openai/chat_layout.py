"""How an answer of `/v1/chat/completions` looks: a message of text, reasoning and calls, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from diptych.generation.finish import Finish
from diptych.router.http.exchange.layout import Json
from diptych.router.http.fields.logprobs import chat_entries
from diptych.router.http.openai.completion_layout import (
    ChoiceLayout,
    CompletionUsage,
    ShownPrompt,
    ShownTokens,
    Style,
    completion_usage,
    reports_of,
)
from diptych.router.text.parsing.parts import (
    Content,
    Message,
    Part,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    message_of,
)
from diptych.router.text.parsing.tool_use import ToolUse
from diptych.router.values.output import End, Output, Piece, Usage
from diptych.router.values.request import ServedModel

Reason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionOfCall(TypedDict):
    """What is called, and how."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AssistantMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]


class ChatChoice(ShownTokens):
    """One of the outputs."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Reason
    stop_reason: str | int | None


class ChatCompletion(ShownPrompt):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    diptych: NotRequired[dict[str, Any]]


class ChatLayout(ChoiceLayout):
    """`chat.completion`, or `chat.completion.chunk` when streamed."""

    def __init__(self, model: ServedModel, style: Style, tool_use: ToolUse, *, stream: bool) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model, style)
        self._names_call = tool_use.choice == "named"
        self._calling: set[int] = set()  # choices of a stream that have calls

    def whole(self, outputs: Sequence[Output], usage: Usage) -> ChatCompletion:
        answer: ChatCompletion = {
            "id": self._head["id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": [self._whole_choice(index, output) for index, output in enumerate(outputs)],
            "usage": completion_usage(usage),
        }
        if reports := reports_of(outputs):
            answer["diptych"] = reports
        self._show_prompt_logprobs(answer, outputs[0])
        self._show_prompt_tokens(answer, 0)
        return answer

    def _whole_choice(self, index: int, output: Output) -> ChatChoice:
        message = message_of(output.parts)
        choice: ChatChoice = {
            "index": index,
            "message": _shown(message),
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output.end.finish, has_calls=bool(message.calls)),
            "stop_reason": self._stop_reason(output.end),
        }
        self._show_tokens(choice, output)
        return choice

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        chunks = super().chunks(index, piece, is_first=is_first)
        if is_first:
            self._show_prompt_tokens(chunks[0], index)
        return chunks

    def _opening(self, index: int) -> list[Json]:
        return [_choice(index, {"role": "assistant", "content": "", "refusal": None})]

    def _deltas(self, index: int, piece: Piece) -> list[Json]:
        """Tokens and their log-probabilities stand in the first: what a parser reads from them may come later."""
        deltas = self._contents(index, piece)
        if not deltas and not self._shows_tokens(piece):
            return []
        choices = [_choice(index, delta) for delta in deltas or [{}]]
        choices[0]["logprobs"] = self._logprobs(piece)
        self._show_tokens(choices[0], piece)
        return choices

    def _contents(self, index: int, piece: Piece) -> list[Json]:
        if piece.read is None:  # most are plain text
            return [{"content": piece.text}] if piece.text else []
        if any(isinstance(part, ToolCallStart) for part in piece.read):
            self._calling.add(index)
        return [_delta(part) for part in piece.read]

    def _end(self, index: int, end: End) -> Json:
        reason = self._finish_reason(end.finish, has_calls=index in self._calling)
        return {**_choice(index, {}), "finish_reason": reason, "stop_reason": self._stop_reason(end)}

    def _finish_reason(self, finish: Finish, *, has_calls: bool) -> Reason:
        """As OpenAI has it: a call of the function that the client named is no reason of the model's."""
        return "tool_calls" if has_calls and finish is Finish.STOP and not self._names_call else finish.value

    def _logprobs(self, part: Piece | Output) -> Json | None:
        if not self.style.logprobs or part.scores is None:
            return None
        return {"content": chat_entries(part.scores, self._token_bytes, self._name), "refusal": None}


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> Json:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _shown(message: Message) -> AssistantMessage:
    shown: AssistantMessage = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [_call(call.call_id, call.name, call.arguments) for call in message.calls]
    return shown


def _call(call_id: str, name: str, arguments: str) -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
