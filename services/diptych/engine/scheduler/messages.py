"""Takes messages between a worker's frontend and its scheduler apart, for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message


def fields_said(message: Message, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that `message` has, in the order of `names`, which are all that it may have."""
    said = {field.name: value for field, value in message.ListFields()}
    for name in names:
        if name in said:
            yield name, said.pop(name)
    assert not said, f"nobody hears of {', '.join(said)}"
