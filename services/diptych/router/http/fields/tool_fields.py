"""The fields of a chat that are about tools: OpenAI's. And turns of a chat, as chat templates know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import from_json

from diptych.router.http.fields.strict_model import ConversationPart, StrictModel
from diptych.router.text.parsing.tool_use import NAME_PATTERN, NO_ARGUMENTS, NO_TOOLS, Function, ToolUse, choose
from diptych.router.values.validation import MAX_PARTS, MAX_TOOLS

_CHOICES: Final = (
    "must be 'none', 'auto' or 'required', or name a function as {'type': 'function', 'function': {'name': ...}}, "
    "or several as {'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
)

Turn = dict[str, Any]
MAX_COUNT: Final = Field(max_length=MAX_PARTS, fail_fast=True)  # of the parts of a message

FunctionName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class FunctionFields(StrictModel):
    """What the model is told of a function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: arguments always match where a call is forced, and never else

    def in_use(self) -> Function:
        return Function(self.name, NO_ARGUMENTS if self.parameters is None else self.parameters)


class Tool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionFields

    def for_template(self) -> Mapping[str, Any]:
        return self.model_dump(exclude_none=True)


class FunctionRef(StrictModel):
    """The name of one."""

    name: FunctionName


class NamedTool(StrictModel):
    """One tool."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(StrictModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedChoice(StrictModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _in_words(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """The parts of a union have errors each; one sentence says more."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(_CHOICES) from None


Mode = Literal["none", "auto", "required"]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[Mode | NamedTool | AllowedChoice, WrapValidator(_in_words)]


class CalledFunction(ConversationPart):
    """A function and its arguments, as the text of a JSON object."""

    name: str
    arguments: str


class CallFields(ConversationPart):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # without effect

    def for_template(self) -> Turn:
        return call_for_template(self.id, self.function.name, parsed_arguments(self.function.arguments))


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """Return what another API offers, as OpenAI's chats say it."""
    return Tool(type="function", function=FunctionFields(name=name, description=description, parameters=parameters))


def named_tool(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionRef(name=name))


def as_parts(content: object) -> object:
    """Text is short for one part of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def call_for_template(call_id: str, name: str, arguments: object) -> Turn:
    """Return a call as a turn has it. Its arguments are a value, or what of a model's text is none."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed_arguments(text: str) -> object:
    """Return their value. A model's arguments may be broken, and still be part of the conversation: then the text."""
    try:
        return from_json(text or "{}")  # takes no nesting that anybody after it could not take
    except ValueError:
        return text


def turn_of_assistant(text: str, thoughts: str, calls: Sequence[Turn]) -> Turn:
    turn: Turn = {"role": "assistant", "content": text}
    if thoughts:
        turn["reasoning_content"] = thoughts
    return {**turn, "tool_calls": calls} if calls else turn


def turn_of_tool(call_id: str, content: Any, names: Mapping[str, str]) -> Turn:
    """Return what a tool has answered; `names` are those of the tools, by call, as far as the calls are known."""
    turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**turn, "name": names[call_id]} if call_id in names else turn


def shown_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> Sequence[Mapping[str, Any]]:
    """Return the tools that the model is told of."""
    return () if choice == "none" else [tool.for_template() for tool in tools]


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """Return what the model may or must call. Raises `InvalidRequest`."""
    functions = [tool.function.in_use() for tool in tools]
    match choice:
        case "none":
            return NO_TOOLS
        case None | "auto" | "required":
            return choose(functions, choice or "auto", parallel=parallel)
        case NamedTool(function=chosen):
            return choose(functions, "named", [chosen.name], parallel=parallel)
        case AllowedChoice(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return choose(functions, allowed.mode, names, parallel=parallel)
