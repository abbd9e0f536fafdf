"""What an answer needs of any API: how its parts look, and how the events of a stream are written.

An API's layout takes text and counts, and gives JSON-ready values. Only the ids and times of new answers come from
elsewhere: they are made where a layout is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import orjson

from diptych.router.values.output import Output, Piece, Usage

Event: TypeAlias = Mapping[str, object]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes of server-sent events."""

    event: Callable[[Event], bytes]
    end: bytes  # after the last event


class Layout(ABC):
    """The parts of one answer, whole or as a stream of chunks."""

    framing: ClassVar[Framing]
    prompts: Sequence[Sequence[int]] = ()  # by output, as tokens; empty where the router does not know them

    @abstractmethod
    def whole(self, outputs: Sequence[Output], usage: Usage) -> object:
        """The answer in one piece."""

    @abstractmethod
    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[Event]:
        """The chunks for a piece of output `index`."""

    @abstractmethod
    def closing(self, usage: Usage) -> Sequence[Event]:
        """The last chunks, after all outputs have ended."""

    def failure(self, body: Event) -> Event:
        """The last chunk of a stream that fails; `body` is what an answer would be that is this error."""
        return body


def _data(value: Event) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(value: Event) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + _data(value)


DATA_ONLY: Final = Framing(_data, b"data: [DONE]\n\n")  # OpenAI's way
NAMED: Final = Framing(_named, b"")  # as OpenAI's newer API and Anthropic's: each event is called by its `type`
