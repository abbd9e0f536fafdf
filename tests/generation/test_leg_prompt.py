"""The forms in which a prompt reaches a scheduler."""

from __future__ import annotations

from array import array

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.codec import content_to_wire
from diptych.generation.leg_prompt import contents_of, prompt_len, prompt_of
from diptych.generation.segments import ContentSegment, Image
from diptych.tokens.packed_tokens import pack
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2 import StartLeg


def test_packed_tokens_come_first() -> None:
    leg = StartLeg(prompt_tokens=pack([7, 2**32 - 1, 0]), prompt_token_ids=[5, 6])
    assert prompt_of(leg).tolist() == [7, 2**32 - 1, 0, 5, 6]
    assert prompt_len(leg) == 5
    assert prompt_of(StartLeg()).tolist() == []


def test_contents_stand_between_the_tokens_of_both_kinds() -> None:
    digest = bytes(range(32))
    contents = [
        worker_pb2.ContentSegment(start=1, num_tokens=2, digest=digest),
        worker_pb2.ContentSegment(start=5, num_tokens=1, digest=digest),
    ]
    leg = StartLeg(prompt_tokens=pack([7, 8]), prompt_token_ids=[5, 6], contents=contents)
    first, second = contents_of(leg)
    assert (first.start, first.num_tokens, first.digest) == (1, 2, digest)
    assert prompt_of(leg).tolist() == [7, *first.keys.tolist(), 8, 5, *second.keys.tolist(), 6]
    assert prompt_len(leg) == len(prompt_of(leg)) == 7


def test_an_image_travels_with_its_segment() -> None:
    image = Image(28, 56, bytes(28 * 56 * 3))
    for sent in (ContentSegment(0, 2, bytes(32), image), ContentSegment(0, 2, bytes(32))):
        assert contents_of(StartLeg(contents=[content_to_wire(sent)])) == (sent,)


def test_packing_takes_any_sequence() -> None:
    assert pack([1, 256]) == pack(array("I", [1, 256])) == b"\x01\0\0\0\0\x01\0\0"


@pytest.mark.parametrize(
    "leg",
    [
        StartLeg(prompt_tokens=b"12345"),
        StartLeg(prompt_text="a", prompt_token_ids=[1]),
        StartLeg(prompt_token_ids=[1], contents=[worker_pb2.ContentSegment(start=2, num_tokens=1, digest=bytes(32))]),
    ],
)
def test_what_is_no_prompt_yet_is_refused(leg: StartLeg) -> None:
    with pytest.raises(InvalidRequest):
        prompt_of(leg)
