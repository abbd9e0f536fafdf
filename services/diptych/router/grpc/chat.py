"""Chats in `diptych.v1.Inference` messages: turns and tools in, parts and answers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic_core import from_json

from diptych.common.errors import InvalidRequest
from diptych.router.request import ChatPrompt
from diptych.router.text.parsing.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart, message_of
from diptych.router.text.parsing.tool_use import NO_ARGUMENTS, NO_TOOLS, Choice, Function, ToolUse, choose
from diptych.v1 import inference_pb2
from diptych.v1.inference_pb2 import ChatAnswer, ChatMessage, ChatMessages, ChatPart, Tool, ToolCall

_CHOICES: Final[Mapping[int, Choice]] = {
    inference_pb2.TOOL_CHOICE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_REQUIRED: "required",
}


def chat_prompt(chat: ChatMessages) -> ChatPrompt:
    """Raises `InvalidRequest`."""
    if chat.continue_last and chat.messages and chat.messages[-1].role != "assistant":
        raise InvalidRequest("continue_last needs a last message of role 'assistant'", param="chat.continue_last")
    return ChatPrompt(
        [_turn(message) for message in chat.messages],
        () if _hides_tools(chat) else [_tool(tool) for tool in chat.tools],
        _object("template_parameters", chat.template_parameters or "{}"),
        chat.reasoning_effort or None,
        chat.continue_last,
    )


def tool_use_of(chat: ChatMessages) -> ToolUse:
    """Raises `InvalidRequest`."""
    functions, parallel = [Function(tool.name, _parameters(tool)) for tool in chat.tools], not chat.single_tool_call
    if chat.called_tool:
        return choose(functions, "named", [chat.called_tool], parallel=parallel)
    if chat.tool_choice not in _CHOICES:
        return NO_TOOLS
    return choose(functions, _CHOICES[chat.tool_choice], parallel=parallel)


def answer_to_wire(parts: Iterable[Part]) -> ChatAnswer:
    message = message_of(parts)
    calls = [ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in message.calls]
    return ChatAnswer(content=message.content, reasoning=message.reasoning, tool_calls=calls)


def part_to_wire(part: Part) -> ChatPart:
    match part:
        case Content(text):
            return ChatPart(content=text)
        case Reasoning(text):
            return ChatPart(reasoning=text)
        case ToolCallStart(index, call_id, name):
            return ChatPart(call_index=index, call_start=ToolCall(id=call_id, name=name))
        case ToolArguments(index, text):
            return ChatPart(call_index=index, call_arguments=text)


def _hides_tools(chat: ChatMessages) -> bool:
    return chat.tool_choice == inference_pb2.TOOL_CHOICE_NONE and not chat.called_tool


def _turn(message: ChatMessage) -> Mapping[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    optional = {"tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    turn |= {key: value for key, value in optional.items() if value}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": _object("tool_calls.arguments", call.arguments or "{}")}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": _parameters(tool)}
    return {"type": "function", "function": function}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return _object("tools.parameters", tool.parameters) if tool.parameters else NO_ARGUMENTS


def _object(param: str, text: str) -> Mapping[str, Any]:
    try:
        value = from_json(text)  # takes no nesting that anybody after it could not take
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be the text of a JSON object", param=param)
    return value
