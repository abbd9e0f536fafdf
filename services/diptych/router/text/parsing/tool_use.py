"""The tools that a chat offers to the model, which it may or must call, and the grammar of the calls that it must."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar
from diptych.generation.json_schema import schemas_in

NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
OBJECT: Final[Mapping[str, Any]] = {"type": "object"}  # what arguments are, should their schema not say so
# Calls as models learn to write them: on one line. Left free, a small model fills lines with blanks.
ONE_LINE: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}
NAME_PATTERN: Final = r"[a-zA-Z0-9_.-]{1,64}"
MAX_FORCED_CALLS: Final = 16  # in one message: a small model may not find the end of a list by itself

Choice = Literal["auto", "required", "named"]

_NAME: Final = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Function:
    """One tool."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)  # the JSON schema of its arguments


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may do with tools in one request."""

    functions: Sequence[Function] = ()  # that may be called, each name once
    choice: Choice = "auto"  # as it likes; at least one; exactly one, the only one given
    parallel: bool = True  # several calls in one message

    @property
    def is_forced(self) -> bool:
        """The whole output is calls."""
        return self.choice != "auto"

    def grammar(self) -> Grammar | None:
        """Return what an output of forced calls must match: arguments alone if it is named, else a list of calls."""
        match self.choice:
            case "auto":
                return None
            case "named":
                return Grammar.from_schema({**OBJECT, **self.functions[0].parameters, "x-guidance": ONE_LINE})
        return Grammar.from_schema(
            {
                "x-guidance": ONE_LINE,
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_FORCED_CALLS if self.parallel else 1,
                "items": {"anyOf": [_call(function) for function in self.functions]},
                "$defs": {function.name: _moved(function) for function in self.functions},
            }
        )


NO_TOOLS: Final = ToolUse()


def choose(functions: Sequence[Function], choice: Choice, names: Sequence[str] = (), *, parallel: bool) -> ToolUse:
    """Return the use of those of `functions` that are named, or of all. Raises `InvalidRequest`."""
    known = {function.name: function for function in functions}
    odd = next((name for name in known if not _NAME.fullmatch(name)), None)
    if odd is not None:
        raise InvalidRequest(f"the name of a function must match {_NAME.pattern}, not {odd[:80]!r}", param="tools")
    if len(known) < len(functions):
        raise InvalidRequest("each function needs a name of its own", param="tools")
    if choice != "auto" and not known:
        raise InvalidRequest("tool_choice is only allowed when tools are given", param="tool_choice")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(f"there is no tool {unknown!r}", param="tool_choice")
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    if choice != "auto":
        _check_can_be_forced(chosen)
    return ToolUse(chosen, choice, parallel)


def _check_can_be_forced(functions: Sequence[Function]) -> None:
    for function in functions:
        if function.parameters.get("type", "object") != "object":
            raise InvalidRequest(f"the parameters of {function.name!r} must be of type 'object'", param="tools")


def _call(function: Function) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"$ref": _place(function)}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _place(function: Function) -> str:
    return f"#/$defs/{function.name}"


def _moved(function: Function) -> Mapping[str, Any]:
    """Return the schema of the arguments with its references to itself as they are in its new place."""
    moved = json.loads(json.dumps(function.parameters))  # a copy whose parts are each in one place
    for schema in schemas_in(moved):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            schema["$ref"] = _place(function) + reference[1:]
    return {**OBJECT, **moved}
