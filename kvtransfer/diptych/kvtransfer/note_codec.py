"""Notes to and from `diptych.v1.TransferNote` bytes. Nothing else knows the wire form of a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError

from diptych.common.arrays import TOKEN_NBYTES
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.notes import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Ack,
    HandedGroup,
    HandOff,
    Kind,
    Note,
    Offer,
    OfferEnded,
    Outcome,
    PagesReady,
    Pull,
    Pulled,
    StopPull,
)
from diptych.v1 import inference_pb2, transfer_pb2, worker_pb2

_FINISH_TO_WIRE = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}
_KIND_TO_WIRE = {
    "tokens": transfer_pb2.HandedGroup.KIND_TOKENS,
    "window": transfer_pb2.HandedGroup.KIND_WINDOW,
    "state": transfer_pb2.HandedGroup.KIND_STATE,
}
_KIND_FROM_WIRE: Final[Mapping[int, Kind]] = {
    transfer_pb2.HandedGroup.KIND_TOKENS: "tokens",
    transfer_pb2.HandedGroup.KIND_WINDOW: "window",
    transfer_pb2.HandedGroup.KIND_STATE: "state",
}
_OUTCOME_FROM_WIRE: Final[Mapping[int, Outcome]] = {
    transfer_pb2.OfferEnded.OUTCOME_TAKEN: "taken",
    transfer_pb2.OfferEnded.OUTCOME_KNOWN: "known",
    transfer_pb2.OfferEnded.OUTCOME_FULL: "full",
    transfer_pb2.OfferEnded.OUTCOME_REFUSED: "refused",
    transfer_pb2.OfferEnded.OUTCOME_FAILED: "failed",
}
_OUTCOME_TO_WIRE = {outcome: transfer_pb2.OfferEnded.Outcome.Name(wire) for wire, outcome in _OUTCOME_FROM_WIRE.items()}
_FINISH_FROM_WIRE = {value: key for key, value in _FINISH_TO_WIRE.items()}


def encode(note: Note, *, sender: int, target: int) -> bytes:
    """Return the bytes of `note`, addressed from one instance to another."""
    wire = transfer_pb2.TransferNote(version=PROTOCOL_VERSION, sender=sender, target=target, room=note.room)
    match note:
        case PagesReady():
            wire.pages_ready.pages.extend(note.pages)
            wire.pages_ready.generations.extend(note.generations)
            wire.pages_ready.cached_prefix_len = note.cached_prefix_len
            wire.pages_ready.num_prompt_tokens = note.num_prompt_tokens
            wire.pages_ready.page_size = note.page_size
            wire.pages_ready.prompt_hash = note.prompt_hash
        case HandOff():
            wire.hand_off.first_token = note.first_token
            wire.hand_off.finish_reason = _FINISH_TO_WIRE[note.finish]
            wire.hand_off.num_pages = note.num_pages
            wire.hand_off.generations.extend(note.generations)
            wire.hand_off.cached_tokens = note.cached_tokens
            wire.hand_off.groups.extend(map(_group_to_wire, note.groups))
            wire.hand_off.row = note.row
        case Ack():
            wire.ack.SetInParent()
        case Abort():
            code = worker_pb2.ErrorCode.Name(note.code)
            wire.abort.reason.CopyFrom(worker_pb2.LegError(code=code, message=note.message))
        case AbortAck():
            wire.abort_ack.SetInParent()
        case Pull():
            wire.pull.CopyFrom(_pull_to_wire(note))
        case Pulled():
            wire.pulled.num_pages, wire.pulled.refusal = note.num_pages, note.refusal
            wire.pulled.generations.extend(note.generations)
        case StopPull():
            wire.stop_pull.SetInParent()
        case Offer():
            wire.offer.CopyFrom(_offer_to_wire(note))
        case OfferEnded():
            outcome = _OUTCOME_TO_WIRE[note.outcome]
            wire.offer_ended.CopyFrom(transfer_pb2.OfferEnded(outcome=outcome, num_pages=note.num_pages))
    return wire.SerializeToString()


def decode(data: bytes, *, sender: int, target: int) -> Note:
    """Return the note in `data`. Raise `MalformedNote` unless it is whole, of our version, and from and for us."""
    wire = parse(data, sender=sender, target=target)
    if wire.room == 0:
        raise MalformedNote("room 0 is not a room")
    return _body(wire)


def parse(data: bytes, *, sender: int, target: int) -> transfer_pb2.TransferNote:
    """Return any note's wire form. Raise `MalformedNote` unless it is of our version, and from and for us."""
    try:
        wire = transfer_pb2.TransferNote.FromString(data)
    except DecodeError as error:
        raise MalformedNote(f"not a TransferNote: {error}") from error
    if wire.version != PROTOCOL_VERSION:
        raise MalformedNote(f"protocol version {wire.version}, ours is {PROTOCOL_VERSION}")
    if (wire.sender, wire.target) != (sender, target):
        raise MalformedNote(f"from {wire.sender:x} for {wire.target:x}, room {wire.room:x}: not this link")
    return wire


def _group_to_wire(group: HandedGroup) -> transfer_pb2.HandedGroup:
    wire = transfer_pb2.HandedGroup(first_token=group.first_token, end_token=group.end_token)
    wire.kind, wire.num_pages = _KIND_TO_WIRE[group.kind], group.num_pages
    return wire


def _group_from_wire(wire: transfer_pb2.HandedGroup) -> HandedGroup:
    if wire.kind not in _KIND_FROM_WIRE:
        raise MalformedNote(f"a group of kind {wire.kind} in a hand-off")
    return HandedGroup(_KIND_FROM_WIRE[wire.kind], wire.first_token, wire.end_token, wire.num_pages)


def _pull_to_wire(note: Pull) -> transfer_pb2.Pull:
    wire = transfer_pb2.Pull(kv=note.kv, namespace=note.namespace, tokens=note.tokens)
    wire.first_token, wire.page_size, wire.timeout_s = note.first_token, note.page_size, note.timeout_s
    wire.pages.extend(note.pages)
    wire.generations.extend(note.generations)
    return wire


def _pull_from_wire(room: int, wire: transfer_pb2.Pull) -> Pull:
    if len(wire.pages) != len(wire.generations):
        raise MalformedNote(f"{len(wire.pages)} pages but {len(wire.generations)} generations")
    if not wire.page_size or len(wire.tokens) % (TOKEN_NBYTES * wire.page_size) or wire.first_token % wire.page_size:
        raise MalformedNote(f"a pull of {len(wire.tokens)} bytes of tokens in pages of {wire.page_size}")
    pages, generations = tuple(wire.pages), tuple(wire.generations)
    asked = wire.kv, wire.namespace, wire.tokens, wire.first_token, wire.page_size
    return Pull(room, *asked, pages, generations, wire.timeout_s)


def _offer_to_wire(note: Offer) -> transfer_pb2.Offer:
    wire = transfer_pb2.Offer(kv=note.kv, namespace=note.namespace, tokens=note.tokens, page_size=note.page_size)
    wire.idle_s, wire.num_uses, wire.within_s = note.idle_s, note.num_uses, note.within_s
    return wire


def _offer_from_wire(room: int, wire: transfer_pb2.Offer) -> Offer:
    if not wire.page_size or not wire.tokens or len(wire.tokens) % (TOKEN_NBYTES * wire.page_size):
        raise MalformedNote(f"an offer of {len(wire.tokens)} bytes of tokens in pages of {wire.page_size}")
    if not (wire.idle_s >= 0 and wire.within_s >= 0):
        raise MalformedNote(f"an offer that is {wire.idle_s} s old, for {wire.within_s} s")
    text = wire.kv, wire.namespace, wire.tokens, wire.page_size
    return Offer(room, *text, wire.idle_s, wire.num_uses, wire.within_s)


def _outcome(wire: int) -> Outcome:
    """An answer counts, whatever it says."""
    return _OUTCOME_FROM_WIRE.get(wire, "failed")


def _known_code(code: int) -> int:
    """An abort counts, whatever its reason: pages wait for it."""
    is_known = code in worker_pb2.ErrorCode.values() and code != worker_pb2.ERROR_CODE_UNSPECIFIED
    return code if is_known else worker_pb2.ERROR_CODE_ABORTED


def _body(wire: transfer_pb2.TransferNote) -> Note:
    room = wire.room
    match wire.WhichOneof("body"):
        case "pages_ready":
            ready = wire.pages_ready
            if len(ready.pages) != len(ready.generations):
                raise MalformedNote(f"{len(ready.pages)} pages but {len(ready.generations)} generations")
            pages, generations = tuple(ready.pages), tuple(ready.generations)
            sizes = ready.cached_prefix_len, ready.num_prompt_tokens, ready.page_size
            return PagesReady(room, pages, generations, *sizes, ready.prompt_hash)
        case "hand_off":
            note = wire.hand_off
            if note.finish_reason not in _FINISH_FROM_WIRE:
                raise MalformedNote(f"finish reason {note.finish_reason} in a hand-off")
            finish = _FINISH_FROM_WIRE[note.finish_reason]
            echo = tuple(note.generations)
            groups = tuple(map(_group_from_wire, note.groups))
            return HandOff(room, note.first_token, finish, note.num_pages, echo, note.cached_tokens, groups, note.row)
        case "ack":
            return Ack(room)
        case "abort":
            return Abort(room, _known_code(wire.abort.reason.code), wire.abort.reason.message)
        case "abort_ack":
            return AbortAck(room)
        case "pull":
            return _pull_from_wire(room, wire.pull)
        case "pulled":
            return Pulled(room, wire.pulled.num_pages, tuple(wire.pulled.generations), wire.pulled.refusal)
        case "stop_pull":
            return StopPull(room)
        case "offer":
            return _offer_from_wire(room, wire.offer)
        case "offer_ended":
            return OfferEnded(room, _outcome(wire.offer_ended.outcome), wire.offer_ended.num_pages)
        case _:
            raise MalformedNote(f"room {room:x}: a note without a body")
