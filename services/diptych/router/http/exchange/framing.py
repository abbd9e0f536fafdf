"""How the events of a stream are written: OpenAI's way, or by name, as its newer API and Anthropic's do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import orjson

Event: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes of server-sent events."""

    event: Callable[[Event], bytes]
    end: bytes  # after the last event


def _data(value: Event) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(value: Event) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + _data(value)


DATA_ONLY: Final = Framing(_data, b"data: [DONE]\n\n")
NAMED: Final = Framing(_named, b"")  # each event is called by its `type`
