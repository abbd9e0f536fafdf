"""POST /v1/responses: what the body may contain. Nothing is kept: the whole conversation comes as `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar
from diptych.generation.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from diptych.router.http.fields import tool_fields
from diptych.router.http.fields.fields import OpenAIFields
from diptych.router.http.fields.grammar_fields import FormatKind, grammar_of_format
from diptych.router.http.fields.request_fields import StopStrings, TopK, params_of
from diptych.router.http.fields.strict_model import StrictModel, Unsupported
from diptych.router.http.fields.tool_fields import FunctionName, function_tool, named_tool, shown_tools, tool_use
from diptych.router.http.openai.responses_input import Input, turns_of
from diptych.router.text.parsing.tool_use import ToolUse
from diptych.router.values.request import ChatPrompt
from diptych.router.values.validation import MAX_TOOLS

LOGPROBS: Final = "message.output_text.logprobs"


class Echoed(TypedDict):
    """What a response says from its beginning on: what it repeats of its request, and what is the same in all."""

    # until it fails, is cut off, or has ended
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    diptych: NotRequired[dict[str, Any]]
    # always
    previous_response_id: None
    store: bool
    truncation: str
    background: bool
    # of the request
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None


class TextFormat(StrictModel):
    """What the output must match."""

    type: FormatKind
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    # without effect
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        return grammar_of_format(self.type, self.json_schema, "text.format.schema")


class TextConfig(StrictModel):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class Reasoning(StrictModel):
    """How the model is to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # without effect
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(StrictModel):
    """How a stream is framed."""

    include_obfuscation: bool | None = None  # without effect: no padding is sent


class FunctionTool(StrictModel):
    """A function that the client runs."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # without effect

    def in_chat(self) -> tool_fields.Tool:
        return function_tool(self.name, self.description, self.parameters)


class NamedFunction(StrictModel):
    """The one function to call."""

    type: Literal["function"]
    name: FunctionName


ToolChoice = tool_fields.Mode | NamedFunction


def choice_in_chat(choice: ToolChoice | None) -> tool_fields.ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return named_tool(choice.name)
    return choice


class ResponsesRequest(OpenAIFields):
    """The body."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # without effect
    # not supported
    conversation: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None

    def check(self) -> None:
        super().check()
        try:
            orjson.dumps(self.echoed())
        except TypeError as error:  # a number beyond 64 bits, deep in a schema
            raise InvalidRequest(f"the response could not repeat this request: {error}") from None
        if self.previous_response_id is not None or self.conversation is not None:
            name = "conversation" if self.previous_response_id is None else "previous_response_id"
            raise InvalidRequest("this server keeps no responses: send the whole conversation as input", param=name)
        if self.prompt is not None:
            raise InvalidRequest("this server keeps no prompts: send the words as input", param="prompt")
        unknown = next((name for name in self.include or () if name not in _INCLUDABLE), None)
        if unknown is not None:
            raise InvalidRequest(f"include takes {' and '.join(_INCLUDABLE)}, not {unknown!r}", param="include")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def chat(self) -> ChatPrompt:
        tools = shown_tools(self._tools(), choice_in_chat(self.tool_choice))
        effort = self.reasoning.effort if self.reasoning else None
        turns, images = turns_of(self.input, self.instructions)
        return ChatPrompt(turns, tools, self.chat_template_kwargs or {}, effort, images=images)

    @property
    def said_as(self) -> Mapping[str, str]:
        return {"max_tokens": "max_output_tokens"}

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        wanted = self.text.format if self.text else None
        num_logprobs = self.top_logprobs or 0 if self.wants_logprobs else None
        return params_of(self, logprobs=num_logprobs, grammar=wanted.grammar() if wanted else None)

    def tool_use(self) -> ToolUse:
        choice = choice_in_chat(self.tool_choice)
        return tool_use(self._tools(), choice, parallel=self.parallel_tool_calls is not False)

    def echoed(self) -> Echoed:
        """What the response says from its beginning on."""
        text = self.text.model_dump(by_alias=True, exclude_none=True) if self.text else {}
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedFunction) else self.tool_choice
        return {
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }

    def _tools(self) -> list[tool_fields.Tool]:
        return [tool.in_chat() for tool in self.tools or ()]


_INCLUDABLE: Final = (LOGPROBS, "reasoning.encrypted_content")  # of the second there is never any
