"""How many fields and messages a message holds: told from its bytes, before anything is made of them. Pure.

An empty message takes two bytes on the wire and a hundred in memory, and whoever makes it keeps the interpreter's lock
until all are made. So the bytes are walked first, field by field, down into the fields that are messages themselves
(entries of maps are) and into groups. Numbers that are packed into one field are one: they take what their bytes do.

Rule: the walk ends at the first field beyond what is allowed, and refuses nothing that protobuf would decode.

A message that was decoded has limits by field, too (`check_generation`), before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_REGEX,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from diptych.router.values.validation import MAX_MESSAGES, MAX_PARTS, MAX_TOKENS, MAX_TOOLS
from diptych.v1.inference_pb2 import ChatMessages, GenerateRequest, SamplingParams

MAX_DEPTH: Final = 100  # protobuf's own
MAX_VARINT_BYTES: Final = 10

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # the last three bits of a tag
_WIDTHS: Final = {_FIXED64: 8, _FIXED32: 4}
_FORMS: Final = {FieldDescriptor.TYPE_MESSAGE: _BYTES, FieldDescriptor.TYPE_GROUP: _GROUP}


class Extent(NamedTuple):
    """What a message holds on all of its levels."""

    fields: int
    messages: int  # itself excepted

    def is_within(self, most: Extent) -> bool:
        return self.fields <= most.fields and self.messages <= most.messages


MOST: Final = Extent(2**17, 2**16)


class Shape(dict[int, "Shape"]):
    """The shapes of the messages within a message of one kind, by the tags of their fields."""


_UNKNOWN: Final = Shape()  # of a group that is no field of ours


def shape_of(kind: Descriptor) -> Shape:
    return _shape(kind, {})


def check_extent(wire: bytes, shape: Shape) -> None:
    """Raise `InvalidRequest` if a message holds more than is ever decoded."""
    if not extent_of(wire, shape, MOST).is_within(MOST):
        words = f"{MOST.fields} fields and {MOST.messages} messages within it"
        raise InvalidRequest(f"the message holds too much: it may have at most {words}, and numbers go packed")


def extent_of(wire: bytes, shape: Shape, most: Extent) -> Extent:
    """Return what the message holds, or as much as is more than `most`. Raises `InvalidRequest` if it is none."""
    walk = _Walk(wire, shape)
    while walk.is_within and walk.num_fields <= most.fields and walk.num_messages <= most.messages:
        walk.step()
    return Extent(walk.num_fields, walk.num_messages)


def _shape(kind: Descriptor, known: dict[str, Shape]) -> Shape:
    if kind.full_name not in known:
        shape = known[kind.full_name] = Shape()
        for field in kind.fields:
            if field.message_type is not None:
                shape[field.number << 3 | _FORMS[field.type]] = _shape(field.message_type, known)
    return known[kind.full_name]


class _Open(NamedTuple):
    """A message that the walk is in."""

    shape: Shape
    end: int
    closing: int | None  # the tag that ends it; None: it ends where its bytes do


class _Walk:
    """Where a walk is, and how it came down there: so it holds as much as the message is deep."""

    def __init__(self, wire: bytes, shape: Shape) -> None:
        self._wire = wire
        self._at = 0
        self._outer: list[_Open] = []
        self._inner = _Open(shape, len(wire), None)
        self.num_fields = 0
        self.num_messages = 0

    @property
    def is_within(self) -> bool:
        """Whether there is more to see. Leaves the messages that end here."""
        while self._at == self._inner.end:
            if self._inner.closing is not None:
                raise _malformed()
            if not self._outer:
                return False
            self._inner = self._outer.pop()
        return True

    def step(self) -> None:
        """Go past a field, or into it."""
        tag = self._varint()
        if tag == self._inner.closing:
            self._inner = self._outer.pop()
            return
        self.num_fields += 1
        form = tag & 7
        if form == _BYTES:
            self._pass_bytes(self._inner.shape.get(tag))
        elif form == _VARINT:
            self._varint()
        elif form in _WIDTHS:
            self._at = self._end_of(_WIDTHS[form])
        elif form == _GROUP:
            self._enter(_Open(self._inner.shape.get(tag, _UNKNOWN), self._inner.end, tag + 1))
        else:
            raise _malformed()

    def _pass_bytes(self, child: Shape | None) -> None:
        end = self._end_of(self._varint())
        if child is None:
            self._at = end
        else:
            self._enter(_Open(child, end, None))

    def _enter(self, part: _Open) -> None:
        self.num_messages += 1
        if len(self._outer) >= MAX_DEPTH:
            raise InvalidRequest(f"the message is nested deeper than {MAX_DEPTH} levels")
        self._outer.append(self._inner)
        self._inner = part

    def _end_of(self, num_bytes: int) -> int:
        end = self._at + num_bytes
        if end > self._inner.end:
            raise _malformed()
        return end

    def _varint(self) -> int:
        part = self._wire[self._at : min(self._at + MAX_VARINT_BYTES, self._inner.end)]
        value = 0
        for index, byte in enumerate(part):
            value |= (byte & 127) << 7 * index
            if byte < 128:
                self._at += index + 1
                return value
        raise _malformed()


def _malformed() -> InvalidRequest:
    return InvalidRequest("the message is no request of this method")


def check_generation(request: GenerateRequest) -> None:
    """Raises `InvalidRequest`."""
    _check_sampling(request.sampling)
    check_chat(request.chat)
    check_count("tokens", request.tokens.ids, MAX_TOKENS)


def _check_sampling(sampling: SamplingParams) -> None:
    check_count("stop", sampling.stop, MAX_STOP_STRINGS)
    check_count("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_count("stop_regex", sampling.stop_regex, MAX_STOP_REGEX)
    check_count("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS)
    check_count("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS)


def check_chat(chat: ChatMessages) -> None:
    """Raises `InvalidRequest`."""
    check_count("chat.messages", chat.messages, MAX_MESSAGES)
    check_count("chat.tools", chat.tools, MAX_TOOLS)
    for index, message in enumerate(chat.messages):
        check_count(f"chat.messages[{index}].tool_calls", message.tool_calls, MAX_PARTS)
        check_count(f"chat.messages[{index}].parts", message.parts, MAX_PARTS)


def check_count(param: str, items: Sized, most: int) -> None:
    """Raises `InvalidRequest`."""
    if len(items) > most:
        raise InvalidRequest(f"{param} takes at most {most}, not {len(items)}", param=param)
