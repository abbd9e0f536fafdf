"""POST /v1/chat/completions: what the body may contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from diptych.common.errors import InvalidRequest
from diptych.engine.sampling_params import MAX_TOP_LOGPROBS
from diptych.router.http.fields import GenerationFields, refuse_unsupported
from diptych.router.http.strict_model import StrictModel
from diptych.router.request import ChatPrompt

_ROLES: Final = {"developer": "system"}  # the newer name for the same thing


def _joined(content: object) -> object:
    """Return the text of `content` given in parts; the type is checked afterwards."""
    if not isinstance(content, list):
        return content
    return "".join(_text_of(part) for part in content)


def _text_of(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"content parts must be of type 'text', not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("a text part needs a string 'text'")
    return text


class Message(StrictModel):
    """One turn. An answer of this API can be sent back as it came."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: ([],) for name in ("tool_calls", "function_call", "audio", "refusal", "annotations")
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]
    name: str | None = None  # without effect
    # not supported
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None
    annotations: Any = None


class ChatRequest(GenerationFields):
    """The body."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # without effect
    parallel_tool_calls: bool | None = None
    # not supported
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            refuse_unsupported(message, message.NEUTRAL, prefix=f"messages[{index}].")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            text = "max_tokens and max_completion_tokens contradict each other: give one"
            raise InvalidRequest(text, param="max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            text = f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {self.top_logprobs}"
            raise InvalidRequest(text, param="top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt(self) -> ChatPrompt:
        turns = [{"role": _ROLES.get(turn.role, turn.role), "content": turn.content} for turn in self.messages]
        return ChatPrompt(turns)
