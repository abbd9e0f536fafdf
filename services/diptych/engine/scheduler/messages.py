"""Takes messages between a worker's frontend and its scheduler apart, for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message

from diptych.v1.engine_pb2 import NextTokens, SchedulerEvents
from diptych.v1.worker_pb2 import LegOutput


def fields_said(message: Message, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that `message` has, in the order of `names`, which are all that it may have."""
    said = {field.name: value for field, value in message.ListFields()}
    for name in names:
        if name in said:
            yield name, said.pop(name)
    assert not said, f"nobody hears of {', '.join(said)}"


def tokens_said(tokens: NextTokens) -> Iterator[tuple[int, int, int]]:
    """Yield the room, the output index and the id of each token."""
    return zip(tokens.rooms, tokens.indices, tokens.token_ids, strict=True)


def outputs_said(events: SchedulerEvents) -> Iterator[LegOutput]:
    """Yield all outputs of a message, in their order, tokens of rooms that go on as outputs like any other."""
    for room, index, token_id in tokens_said(events.tokens):
        yield LegOutput(room=room, first_index=index, token_ids=(token_id,))
    yield from events.outputs
