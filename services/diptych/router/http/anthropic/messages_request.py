"""POST /v1/messages: what the body may contain, in Anthropic's words, and the chat that it is to a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import MAX_STOP_STRINGS, SamplingParams
from diptych.router.http.fields import tool_fields
from diptych.router.http.fields.content_parts import NO_FILES
from diptych.router.http.fields.grammar_fields import grammar_of_format
from diptych.router.http.fields.request_fields import RequestFields, TopK, params_of
from diptych.router.http.fields.strict_model import ConversationPart, GenerationBody, StrictModel
from diptych.router.http.fields.tool_fields import (
    MAX_COUNT,
    FunctionName,
    Turn,
    as_parts,
    call_for_template,
    function_tool,
    named_tool,
    shown_tools,
    tool_use,
    turn_of_assistant,
    turn_of_tool,
)
from diptych.router.text.content_parts import content_of, without_images
from diptych.router.text.parsing.tool_use import ToolUse
from diptych.router.values.images import ImageInput, image_at
from diptych.router.values.request import ChatPrompt
from diptych.router.values.validation import MAX_MESSAGES, MAX_TOOLS


class Block(ConversationPart):
    """What every block may have."""

    cache_control: dict[str, Any] | None = None  # without effect: what can be cached always is


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Any = None  # without effect


TextBlocks = Annotated[
    list[TextBlock], MAX_COUNT, BeforeValidator(as_parts, json_schema_input_type=str | list[TextBlock])
]


class Base64Source(ConversationPart):
    """The file of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]  # without effect: the file says it
    data: str


class UrlSource(ConversationPart):
    """Where an image is."""

    type: Literal["url"]
    url: str


class FileSource(ConversationPart):
    """An uploaded file: refused."""

    type: Literal["file"]
    file_id: str


class ImageBlock(Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]

    def image(self) -> ImageInput:
        """Raises `InvalidRequest`."""
        match self.source:
            case Base64Source(data=data):
                return ImageInput("messages", file=data)
            case UrlSource(url=url):
                return image_at(url, "messages")
            case FileSource():
                raise InvalidRequest(NO_FILES, param="messages")


AnyShown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
ShownBlocks = Annotated[
    list[AnyShown], MAX_COUNT, BeforeValidator(as_parts, json_schema_input_type=str | list[AnyShown])
]


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
    content: ShownBlocks = Field(default_factory=list)
    is_error: bool | None = None  # without effect: the content should say it


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[list[AnyBlock], MAX_COUNT, BeforeValidator(as_parts, json_schema_input_type=str | list[AnyBlock])]


class Message(ConversationPart):
    """One turn. An answer of this API can be sent back as it came."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    # without effect
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    def in_chat(self) -> tool_fields.Tool:
        return function_tool(self.name, self.description, self.input_schema)


class ToolChoice(StrictModel):
    """Which tool the model may call, or must."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None  # of `tool`
    disable_parallel_tool_use: bool | None = None

    def in_chat(self) -> tool_fields.ToolChoice:
        """Raises `InvalidRequest`."""
        match self.type:
            case "any":
                return "required"
            case "auto" | "none":
                return self.type
        if self.name is None:
            raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
        return named_tool(self.name)


class Thinking(StrictModel):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # without effect
    display: str | None = None  # likewise


class Metadata(StrictModel):
    """Who asks."""

    user_id: str | None = None


class OutputFormat(StrictModel):
    """What the output must match."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """How the output is to be."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptFields(GenerationBody):
    """What the prompt is made of; all that counting its tokens takes."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # without effect: what can be cached always is

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            allowed = _ALLOWED[message.role]
            wrong = next((block for block in message.content if not isinstance(block, allowed)), None)
            if wrong is not None:
                text = f"a message of role {message.role} can't hold a block of type {wrong.type}"
                raise InvalidRequest(text, param=f"messages[{index}].content")

    def chat(self) -> ChatPrompt:
        turns: list[Turn] = [{"role": "system", "content": _joined(self.system)}] if self.system else []
        tool_names: dict[str, str] = {}
        for message in self.messages:
            turns += self._turns(message, tool_names)
            tool_names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
        tools = shown_tools(self._tools(), self._tool_choice())
        is_begun, (turns, images) = _is_begun(turns), without_images(turns)
        return ChatPrompt(turns, tools, reasoning_effort=self._effort(), is_begun=is_begun, images=images)

    def tool_use(self) -> ToolUse:
        """Raises `InvalidRequest`."""
        is_alone = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return tool_use(self._tools(), self._tool_choice(), parallel=not is_alone)

    def _tools(self) -> list[tool_fields.Tool]:
        return [tool.in_chat() for tool in self.tools or ()]

    def _tool_choice(self) -> tool_fields.ToolChoice | None:
        return None if self.tool_choice is None else self.tool_choice.in_chat()

    def _effort(self) -> str | None:
        """Say in a word how the model is to think; None: as it does by itself."""
        effort = self.output_config.effort if self.output_config else None
        match self.thinking.type if self.thinking else "adaptive":
            case "disabled":
                return "none"
            case "enabled":
                return effort or "medium"
        return effort

    def _turns(self, message: Message, tool_names: Mapping[str, str]) -> list[Turn]:
        match message.role:
            case "assistant":
                return [_turn_of_assistant(message.content)]
            case "user":
                return _turns_of_user(message.content, tool_names)
            case "system":
                return [{"role": "system", "content": _joined(message.content)}]


_ALLOWED: Mapping[str, tuple[type[AnyBlock], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def _is_begun(turns: Sequence[Turn]) -> bool:
    """Words of the assistant at the end are the beginning of its answer."""
    last = turns[-1] if turns else {"role": "user"}
    return last["role"] == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last


def _joined(blocks: Iterable[AnyBlock]) -> str:
    """Return all their text."""
    return "".join([block.text for block in blocks if isinstance(block, TextBlock)])


def _content(blocks: Iterable[AnyBlock]) -> Any:
    """Return their text, and where they are images, too, both."""
    shown = [block for block in blocks if isinstance(block, TextBlock | ImageBlock)]
    return content_of([block.text if isinstance(block, TextBlock) else block.image() for block in shown])


def _turns_of_user(content: Sequence[AnyBlock], tool_names: Mapping[str, str]) -> list[Turn]:
    """Return a turn for each answer of a tool, and one for the text between them."""
    turns: list[Turn] = []
    for is_result, run in groupby(content, lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            turns.append({"role": "user", "content": _content(run)})
        else:
            results = [block for block in run if isinstance(block, ToolResultBlock)]
            turns += [turn_of_tool(each.tool_use_id, _content(each.content), tool_names) for each in results]
    return turns


def _turn_of_assistant(content: Sequence[AnyBlock]) -> Turn:
    thoughts = "".join([block.thinking for block in content if isinstance(block, ThinkingBlock)])
    calls = [
        call_for_template(block.id, block.name, block.input) for block in content if isinstance(block, ToolUseBlock)
    ]
    return turn_of_assistant(_joined(content), thoughts, calls)


class MessagesRequest(PromptFields, RequestFields):
    """The body."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    # without effect
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None

    @property
    def said_as(self) -> Mapping[str, str]:
        return {"stop": "stop_sequences"}

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        wanted = self.output_config.format if self.output_config else None
        grammar = (
            None
            if wanted is None
            else grammar_of_format("json_schema", wanted.json_schema, "output_config.format.schema")
        )
        return params_of(self, stop=self.stop_sequences, grammar=grammar)
