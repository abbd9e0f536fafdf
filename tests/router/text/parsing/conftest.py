"""Parsers of formats by name, for tools that are always the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.message_formats import REASONING_FORMATS, MessageFormats
from diptych.router.text.parsing.parts import MessageParser, Part, message_of
from diptych.router.text.parsing.tool_use import Function, ToolUse

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "code": {"type": ["string", "null"]},
    },
}
FUNCTIONS = (Function("weather", PARAMETERS), Function("now"))

Parse = Callable[..., MessageParser]


@pytest.fixture(scope="session")
def new_parser() -> Parse:
    """`new_parser(tools="", reasoning="", prompt="", **tool_use)`: a parser for one message."""

    def new(tools: str = "", reasoning: str = "", prompt: str = "", **use: Any) -> MessageParser:
        formats = MessageFormats(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning))
        tool_use = ToolUse(**{"functions": FUNCTIONS, **use})
        free = formats.parser(tool_use, prompt)
        make = formats.parser_of_shape(tool_use, formats.preamble(prompt)) if tool_use.is_forced else free
        assert make is not None
        return make()

    return new


@pytest.fixture(scope="session")
def read(new_parser: Parse) -> Callable[..., Any]:
    """`read(text, cuts=(), **new_parser_fields)`: content, reasoning, and (name, arguments) of each call."""

    def read_text(text: str, cuts: tuple[int, ...] = (), **fields: Any) -> Any:
        parser = new_parser(**fields)
        parts: list[Part] = []
        for start, end in itertools.pairwise((0, *sorted(cuts), len(text))):
            parts += parser.push(text[start:end])
        message = message_of([*parts, *parser.finish()])
        return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]

    return read_text
