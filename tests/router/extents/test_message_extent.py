"""How much of a message is looked at before it is decoded, and what of it is refused."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from diptych.common.errors import InvalidRequest
from diptych.router.extents.message_extent import MAX_DEPTH, MOST, Extent, check_extent, extent_of, shape_of
from diptych.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    SamplingParams,
    TokenIds,
    ToolCall,
)

ALL = Extent(2**62, 2**62)
REQUEST: Any = GenerateRequest
SHAPE = shape_of(REQUEST.DESCRIPTOR)
MANY_BYTES = 8 << 20


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def group(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 3) + content + varint(number << 3 | 4)


def chat(content: bytes) -> bytes:
    return part(4, content)


HOSTILE = {
    "empty messages": chat(b"\x0a\x00" * (MANY_BYTES // 2)),
    "empty calls in one message": chat(part(1, b"\x1a\x00" * (MANY_BYTES // 2))),
    "messages of an empty call": chat(b"\x0a\x02\x1a\x00" * (MANY_BYTES // 4)),
    "biases": part(5, b"\x6a\x00" * (MANY_BYTES // 2)),
    "numbers that are not packed": part(3, b"\x08\x01" * (MANY_BYTES // 2)),
    "texts": part(5, b"\x32\x00" * (MANY_BYTES // 2)),
    "one message again and again": b"\x2a\x00" * (MANY_BYTES // 2),
    "fields that nobody knows": b"\xf8\x7f\x00" * (MANY_BYTES // 3),
    "groups that nobody knows": b"\xfb\x7f\xfc\x7f" * (MANY_BYTES // 4),
}


@pytest.mark.parametrize("wire", HOSTILE.values(), ids=HOSTILE.keys())
def test_of_a_message_that_holds_too_much_no_more_is_looked_at_and_kept(wire: bytes) -> None:
    most = Extent(2**12, 2**11)
    tracemalloc.start()
    seen = extent_of(wire, SHAPE, most)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not seen.is_within(most)
    assert seen.fields <= most.fields + 1
    assert seen.messages <= most.messages + 1
    assert peak_bytes < 2**14
    with pytest.raises(InvalidRequest, match=f"at most {MOST.fields} fields and {MOST.messages} messages within it"):
        check_extent(wire, SHAPE)


ALLOWED = {
    "a long text": (GenerateRequest(text="a" * MANY_BYTES), Extent(1, 0)),
    "packed tokens": (GenerateRequest(tokens=TokenIds(ids=range(2**20))), Extent(2, 1)),
    "packed tokens alone": (DetokenizeRequest(token_ids=range(2**20)), Extent(1, 0)),
    "biases": (GenerateRequest(sampling=SamplingParams(logit_bias={1: 0.5, 300: -1})), Extent(1 + 2 + 4, 1 + 2)),
    "a chat": (
        GenerateRequest(
            chat=ChatMessages(
                messages=[ChatMessage(role="user", content="hi"), ChatMessage(tool_calls=[ToolCall(id="a")] * 2)]
            ),
            sampling=SamplingParams(temperature=0.5, seed=2**60, stop=["a", "b"]),
            priority=-3,
        ),
        Extent(2 + 1 + (2 + 2) + (2 + 2) + 4, 2 + 2 + 2),
    ),
    "nothing": (GenerateRequest(), Extent(0, 0)),
}


@pytest.mark.parametrize(("message", "extent"), ALLOWED.values(), ids=ALLOWED.keys())
def test_the_fields_and_messages_of_all_levels_are_counted(message: Any, extent: Extent) -> None:
    shape = shape_of(message.DESCRIPTOR)
    assert extent_of(message.SerializeToString(), shape, MOST) == extent
    check_extent(message.SerializeToString(), shape)


def nested(depth: int) -> bytes:
    wire = b""
    for _ in range(depth):
        wire = group(2000, wire)
    return wire


def test_messages_are_as_deep_as_protobuf_allows() -> None:
    check_extent(nested(MAX_DEPTH), SHAPE)
    GenerateRequest.FromString(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="nested deeper than 100 levels"):
        check_extent(nested(MAX_DEPTH + 1), SHAPE)
    with pytest.raises(DecodeError):
        GenerateRequest.FromString(nested(MAX_DEPTH + 1))


MALFORMED = {
    "a cut tag": b"\x80",
    "a tag without an end": b"\x80" * 11,
    "a cut number": b"\x30\xff",
    "a number without an end": b"\x30" + b"\xff" * 11,
    "a cut text": b"\x0a\x05abc",
    "a message longer than the one around it": chat(b"\x0a\x05abc"),
    "a field of eight bytes with seven": b"\x09" + b"x" * 7,
    "a field of four bytes with three": b"\x0d" + b"x" * 3,
    "a group that does not end": b"\x0b\x08\x01",
    "a group that ends as another": b"\x0b\x14",
    "the end of no group": b"\x0c",
    "a group that ends outside": chat(b"\x0b") + b"\x0c",
    "a form that there is not": b"\x0e\x00",
}


@pytest.mark.parametrize("wire", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_message_is_refused_as_protobuf_does(wire: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no request of this method"):
        check_extent(wire, SHAPE)
    with pytest.raises(DecodeError):
        GenerateRequest.FromString(wire)


def test_nothing_that_protobuf_decodes_is_refused() -> None:
    rng = Random(5)
    message, _ = ALLOWED["a chat"]
    whole = message.SerializeToString() + group(2000, part(7, b"x")) + GenerateRequest(text="abc").SerializeToString()
    num_decoded = 0
    for _ in range(3000):
        wire = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            wire[rng.randrange(len(wire))] = rng.randrange(256)
        try:
            GenerateRequest.FromString(bytes(wire))
        except DecodeError:
            continue
        num_decoded += 1
        extent_of(bytes(wire), SHAPE, ALL)
    assert num_decoded > 300
