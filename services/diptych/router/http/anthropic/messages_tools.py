"""The tools of /v1/messages, in Anthropic's words; what they mean is what a chat's tools mean."""

from __future__ import annotations

from typing import Any, Literal

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields import tool_fields
from diptych.router.http.fields.strict_model import StrictModel
from diptych.router.http.fields.tool_fields import FunctionFields, FunctionName, FunctionRef, NamedTool


class Tool(StrictModel):
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
        function = FunctionFields(name=self.name, description=self.description, parameters=self.input_schema)
        return tool_fields.Tool(type="function", function=function)


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
        return NamedTool(type="function", function=FunctionRef(name=self.name))
