"""What a chat's output consists of once it is read: text for people, reasoning, and calls of tools, in their order.

Rule: parts joined are the same however the text was cut into pieces. Text that can't be read as a call is content; no
text is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool. Its arguments follow."""

    index: int  # 0, 1, ... of the message's calls
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call's arguments: the text of a JSON object, if the model writes what it should."""

    index: int
    text: str


Part = Content | Reasoning | ToolCallStart | ToolArguments


class MessageParser(Protocol):
    """Reads the text of one message as it arrives."""

    def push(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        ...

    def finish(self) -> list[Part]:
        """Return the rest: no more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """All parts of a message together."""

    content: str
    reasoning: str
    calls: Sequence[ToolCall]


def message_of(parts: Iterable[Part]) -> Message:
    """Return what the parts of a message are together."""
    content, reasoning, starts, arguments = [], [], [], []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart():
                starts.append(part)
                arguments.append("")
            case ToolArguments(index, text):
                arguments[index] += text
    calls = [ToolCall(start.call_id, start.name, text) for start, text in zip(starts, arguments, strict=True)]
    return Message("".join(content), "".join(reasoning), calls)
