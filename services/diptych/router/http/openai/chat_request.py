"""POST /v1/chat/completions: what the body may contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import MAX_TOP_LOGPROBS
from diptych.router.http.fields.content_parts import ChatContent, chat_content
from diptych.router.http.fields.fields import GenerationFields
from diptych.router.http.fields.neutral_values import is_neutral
from diptych.router.http.fields.strict_model import ConversationPart, Unsupported
from diptych.router.http.fields.text_parts import PredictionFields, predicted_text
from diptych.router.http.fields.tool_fields import CallFields, ToolChoice, Tools, Turn, shown_tools, tool_use
from diptych.router.text.content_parts import without_images
from diptych.router.text.parsing.tool_use import ToolUse
from diptych.router.values.images import ImageInput
from diptych.router.values.request import ChatPrompt
from diptych.router.values.validation import MAX_MESSAGES, MAX_PARTS

ROLES: Final[Mapping[str, str]] = {"developer": "system"}  # the newer name for the same thing


Calls = Annotated[list[CallFields], Field(max_length=MAX_PARTS, fail_fast=True)]


class Message(ConversationPart):
    """One turn. An answer of this API can be sent back as it came."""

    UNSUPPORTED: ClassVar[Sequence[str]] = ("function_call", "audio", "refusal", "annotations", "images")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ChatContent = None
    name: str | None = None  # for templates that look at it
    tool_calls: Calls | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that this is the result of
    reasoning_content: str | None = None  # of an assistant, for templates that look at it
    reasoning: str | None = None  # another name for the same
    # not supported
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: Unsupported = None
    annotations: Unsupported = None
    images: Unsupported = None

    def check(self, path: str) -> None:
        for name in self.UNSUPPORTED:
            if not is_neutral(getattr(self, name), ([],)):
                raise InvalidRequest(f"{path}.{name} is not supported by this server", param=f"{path}.{name}")
        if self.content is None and self.role != "assistant":  # who called, only thought, or said nothing
            raise InvalidRequest(f"{path}.content is required", param=f"{path}.content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            words = "is required in a message of role 'tool', and allowed in no other"
            raise InvalidRequest(f"{path}.tool_call_id {words}", param=f"{path}.tool_call_id")
        if not isinstance(self.content, str | None) and self.role not in ("user", "tool"):
            words = "may have images in a message of role 'user' or 'tool', and in no other"
            raise InvalidRequest(f"{path}.content {words}", param=f"{path}.content")
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, name) and self.role != "assistant":
                words = "is only allowed in a message of role 'assistant'"
                raise InvalidRequest(f"{path}.{name} {words}", param=f"{path}.{name}")

    def turn(self, path: str) -> Turn:
        """Return the turn as chat templates know it: absent keys are absent, and arguments are no text.

        Images are in it yet. Raises `InvalidRequest`.
        """
        content = chat_content(self.content or "", f"{path}.content")
        turn: Turn = {"role": ROLES.get(self.role, self.role), "content": content}
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thoughts}
        turn |= {key: value for key, value in optional.items() if value is not None}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return turn


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def turns_of(messages: Sequence[Message]) -> tuple[list[Turn], list[ImageInput]]:
    """Return the turns of a chat, and its images. Raises `InvalidRequest`."""
    return without_images([message.turn(f"messages[{index}]") for index, message in enumerate(messages)])


class ChatRequest(GenerationFields):
    """The body."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call in a message
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None  # the last message is the beginning of the answer
    add_generation_prompt: bool | None = None  # the opposite, said by those who say both
    prediction: PredictionFields | None = None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            text = "continue_final_message needs a last message of role 'assistant'"
            raise InvalidRequest(text, param="continue_final_message")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(self.continue_final_message):
            text = "add_generation_prompt must be the opposite of continue_final_message"
            raise InvalidRequest(text, param="add_generation_prompt")
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

    @property
    def predicted_text(self) -> str:
        return predicted_text(self.prediction)

    def prompt(self) -> ChatPrompt:
        turns, images = turns_of(self.messages)
        tools = shown_tools(self.tools or (), self.tool_choice)
        is_begun = bool(self.continue_final_message)
        return ChatPrompt(turns, tools, self.chat_template_kwargs or {}, self.reasoning_effort, is_begun, images)

    def tool_use(self) -> ToolUse:
        """Raises `InvalidRequest`."""
        return tool_use(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
