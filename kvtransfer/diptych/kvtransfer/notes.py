"""The notes that prefill and decode exchange about a room, as values. `note_codec` puts them on the wire.

The protocol, and who may send what when, is told in `proto/diptych/v1/transfer.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tokens", "window", "state"]

PROTOCOL_VERSION = 5  # of the notes, and of the metadata that peers link by


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Decode grants pages for the prompt's tokens from `cached_prefix_len` on."""

    room: int
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    cached_prefix_len: int  # tokens decode holds already; a multiple of the page size
    num_prompt_tokens: int
    page_size: int  # tokens of each
    prompt_hash: int


@dataclass(frozen=True, slots=True)
class HandedGroup:
    """What was written of layers that keep the same of a request: keys and values, those in a window, or a state."""

    kind: Kind
    first_token: int  # of the prompt
    end_token: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class HandOff:
    """Prefill is done: every page write was flushed, and here is the first token."""

    room: int
    first_token: int
    finish: str | None  # "stop" or "length" when the first token ended the request
    num_pages: int
    generations: tuple[int, ...]  # echo of the grant
    cached_tokens: int
    groups: tuple[HandedGroup, ...] = ()  # in the order of the grant


@dataclass(frozen=True, slots=True)
class Ack:
    """Decode verified the pages; prefill may release its own."""

    room: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gave the room up. From prefill it also says: no more writes will come."""

    room: int
    code: int  # diptych.v1.ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Prefill to decode: no more writes will come."""

    room: int


Note = PagesReady | HandOff | Ack | Abort | AbortAck
