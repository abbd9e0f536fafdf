"""How the events of a stream are written: OpenAI's way, or by name, as its newer API and Anthropic's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes of server-sent events."""

    event: Callable[[Json], bytes]
    end: bytes  # after the last event


def _data(value: Json) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(value: Json) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + _data(value)


DATA_ONLY: Final = Framing(_data, b"data: [DONE]\n\n")
NAMED: Final = Framing(_named, b"")  # each event is called by its `type`
