"""The notes that workers exchange about a room, or about a pull, as values. `note_codec` puts them on the wire.

The protocol, and who may send what when, is told in `proto/diptych/v1/transfer.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tokens", "window", "state"]
Outcome = Literal["taken", "known", "full", "refused", "failed"]  # of an offer

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
    """What was written of layers that keep the same of a request: keys and values, those in a window, or a state.

    Where page sizes differ, prefill may not have all that the first pages of a window are granted for, but always what
    tokens behind the prompt see; `first_token` says from where on they are whole.
    """

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
    row: bytes = b""  # the hidden row of the prompt's last token, bfloat16, for draft layers that join it


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


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for the KV of a prefix that the receiver may have cached, from `first_token` on, into pages of the sender.

    Pages are granted for all its tokens from there on, and behind those for what layers with a window see behind them.
    """

    room: int  # of the pull, and of no request
    kv: str  # what the KV must be, which is the same for both or nothing is given
    namespace: bytes  # in which prompts share KV
    tokens: bytes  # of the whole prefix, in whole pages: little-endian 64-bit numbers
    first_token: int  # that the sender lacks; a multiple of the page size
    page_size: int
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    timeout_s: float  # for the writes


@dataclass(frozen=True, slots=True)
class Pulled:
    """No write of the pull will come any more. Its first pages are written, so many as it says: none where refused."""

    room: int
    num_pages: int  # of tokens, from the first one that was asked for
    generations: tuple[int, ...]  # echo of all pages that were written
    refusal: str = ""  # why nothing is written, in words


@dataclass(frozen=True, slots=True)
class StopPull:
    """The pages are not wanted any more: answered by `Pulled` when no write will come."""

    room: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The receiver may pull this, under the number of the offer, from who leaves or has ended an output."""

    room: int  # of the pull, and of no request
    kv: str  # these four as in `Pull`
    namespace: bytes
    tokens: bytes
    page_size: int
    idle_s: float  # since it was wanted last; of a session that is away, what its return is likely to take
    num_uses: int  # requests that made or reused it
    within_s: float  # after that the sender may be gone, or nobody returns


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """What came of an offer. "full" and "refused" hold for what is worth less, too; "failed" for this one only."""

    room: int
    outcome: Outcome
    num_pages: int = 0  # that were taken


Note = PagesReady | HandOff | Ack | Abort | AbortAck | Pull | Pulled | StopPull | Offer | OfferEnded
