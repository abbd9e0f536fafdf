"""The blocks of a message: neighbouring parts of one kind are one block, and each call of a tool is its own. Pure.

Rule: one block is open at a time, and they are numbered in the order in which they open. Arguments belong to the call
that began last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from diptych.router.text.parsing.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """What a client is told of as one thing."""

    index: int
    kind: Kind
    call_id: str = ""  # of a call
    name: str = ""  # likewise: of the tool
    pieces: list[str] = field(default_factory=list)  # of a call: of its arguments

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins, still empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has got more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete."""

    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """The blocks of one message as it grows."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def push(self, parts: Iterable[Part]) -> list[Change]:
        """Take the next parts; return what changes."""
        return [change for part in parts for change in self._on_part(part)]

    def close(self) -> list[Change]:
        """Close the block that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Closed(self.all[-1])]

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def _on_part(self, part: Part) -> list[Change]:
        match part:
            case Content(text):
                return [*self._ensure("text"), self._grow(text)]
            case Reasoning(text):
                return [*self._ensure("reasoning"), self._grow(text)]
            case ToolCallStart(_, call_id, name):
                return self._open("call", call_id, name)
            case ToolArguments(_, text):
                return [self._grow(text)]

    def _ensure(self, kind: Kind) -> list[Change]:
        return [] if self._is_open and self.all[-1].kind == kind else self._open(kind)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> list[Change]:
        closed = self.close()
        self.all.append(Block(len(self.all), kind, call_id, name))
        self._is_open = True
        return [*closed, Opened(self.all[-1])]

    def _grow(self, text: str) -> Grown:
        block = self.all[-1]
        block.pieces.append(text)
        return Grown(block, text)
