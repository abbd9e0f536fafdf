"""The functions that a response may call; what they mean is what a chat's tools mean."""

from __future__ import annotations

from typing import Any, Literal

from diptych.router.http.fields import tool_fields
from diptych.router.http.fields.strict_model import StrictModel
from diptych.router.http.fields.tool_fields import FunctionFields, FunctionName, FunctionRef, NamedTool


class FunctionTool(StrictModel):
    """A function that the client runs."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # without effect

    def in_chat(self) -> tool_fields.Tool:
        function = FunctionFields(name=self.name, description=self.description, parameters=self.parameters)
        return tool_fields.Tool(type="function", function=function)


class NamedFunction(StrictModel):
    """The one function to call."""

    type: Literal["function"]
    name: FunctionName


ToolChoice = tool_fields.Mode | NamedFunction


def choice_in_chat(choice: ToolChoice | None) -> tool_fields.ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool(type="function", function=FunctionRef(name=choice.name))
    return choice
