"""Prompts of segments have names as prompts of tokens have, and those of tokens alone the same as ever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.arrays import I64
from diptych.common.errors import InvalidRequest
from diptych.generation.page_hash import page_hashes, prompt_hash
from diptych.generation.segments import (
    ContentSegment,
    Image,
    TokenSegment,
    content_len,
    prompt_keys,
    rope_positions,
    rope_shift,
    segments,
)

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))
PAGE = 4


def tokens(*ids: int) -> I64:
    return np.array(ids, np.int64)


def test_a_prompt_of_tokens_is_named_by_them() -> None:
    ids = np.arange(8)
    assert prompt_keys(ids) is ids
    assert page_hashes(prompt_keys(ids), 4).tolist() == [0xFE937A120BF0F911, 0x8403FD6AB362856D]
    assert prompt_hash(prompt_keys(ids, ())) == 0xDEAF98923C3A4791


def test_keys_of_content_are_the_same_in_every_release() -> None:
    """Workers and routers of different releases meet on the wire."""
    keys = prompt_keys(np.arange(6), [ContentSegment(3, 5, CAT)])
    assert np.delete(keys, range(3, 8)).tolist() == [0, 1, 2, 3, 4, 5]
    assert keys[3:8].view(np.uint64).tolist() == [
        0xF152128352A04802,
        0x87FF018323D03165,
        0xEA471271B0D276EF,
        0xF698AB0CAA704836,
        0xEA2FF9694FCA3856,
    ]
    assert page_hashes(keys, 4).tolist() == [0x58D29B9991507EE4, 0x2118517C38B6589F]


def test_segments_stand_in_their_order() -> None:
    first, second, third = ContentSegment(0, 2, CAT), ContentSegment(3, 1, DOG), ContentSegment(4, 2, CAT)
    found = list(segments(tokens(7, 8, 9), [first, second, third]))
    assert [each if isinstance(each, ContentSegment) else each.token_ids.tolist() for each in found] == [
        first,
        [7],
        second,
        third,
        [8, 9],
    ]
    assert content_len([first, second, third]) == 5
    assert list(segments(tokens(), [first])) == [first]
    assert not list(segments(tokens(), []))
    (alone,) = segments(tokens(7), [])
    assert isinstance(alone, TokenSegment)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.binary(min_size=32, max_size=32)), max_size=4),
)
def test_each_place_has_its_key(ids: list[int], parts: list[tuple[int, int, bytes]]) -> None:
    contents, expected, left = list[ContentSegment](), list[int](), list(ids)
    for gap, num_tokens, digest in parts:
        expected, left = expected + left[:gap], left[gap:]
        content = ContentSegment(len(expected), num_tokens, digest)
        contents.append(content)
        expected += content.keys.tolist()
    keys = prompt_keys(np.array(ids, np.int64), contents)
    assert keys.tolist() == expected + left
    assert keys.dtype == np.int64
    assert (keys >= 0).sum() == len(ids), "no content looks like a token"


def test_pages_are_shared_up_to_the_first_content_that_differs() -> None:
    ids = np.arange(100, 120)

    def pages(*contents: ContentSegment) -> list[int]:
        return [int(name) for name in page_hashes(prompt_keys(ids, contents), PAGE)]

    one, same = pages(ContentSegment(9, 8, CAT)), pages(ContentSegment(9, 8, CAT))
    assert one == same
    assert len(one) == 7
    for other in (ContentSegment(9, 8, DOG), ContentSegment(10, 8, CAT), ContentSegment(9, 9, CAT)):
        shared = [name == also for name, also in zip(one, pages(other), strict=False)]
        assert shared == [True, True, *[False] * 5], other
    once, twice = pages(ContentSegment(4, 4, CAT)), pages(ContentSegment(4, 4, CAT), ContentSegment(8, 4, DOG))
    assert twice[:2] == once[:2]
    assert twice[2] != once[2]


def test_every_bit_of_a_digest_counts_within_four_places() -> None:
    for bit in range(256):
        digest = bytearray(CAT)
        digest[bit // 8] ^= 1 << bit % 8
        keys, changed = (ContentSegment(0, 4, each).keys for each in (CAT, bytes(digest)))
        assert (keys != changed).sum() == (0 if bit % 64 == 63 else 1), "the sign tells content from tokens"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ContentSegment(0, 1, b"short"), "32 bytes, not 5"),
        (ContentSegment(0, 0, CAT), "at least one place"),
        (ContentSegment(4, 1, CAT), "place 4: those before it leave 0 to 3"),
    ],
)
def test_content_that_cannot_stand_there_is_refused(content: ContentSegment, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        prompt_keys(tokens(1, 2, 3), [content])
    assert refused.value.param == "contents"


def test_contents_do_not_overlap() -> None:
    with pytest.raises(InvalidRequest, match="place 2: those before it leave 3 to 5"):
        prompt_keys(tokens(1, 2, 3), [ContentSegment(1, 2, CAT), ContentSegment(2, 1, DOG)])


def image(start: int, rows: int, columns: int, side: int = 28) -> ContentSegment:
    return ContentSegment(start, rows * columns, CAT, Image(rows * side, columns * side))


def test_an_image_s_grid_follows_from_its_size_and_its_places() -> None:
    assert image(0, 3, 5).grid == (3, 5)
    assert image(0, 1, 1, 8).grid == (1, 1)
    for size in ((28 * 4, 28 * 5), (0, 28), (28, 0), (10, 10)):
        assert ContentSegment(0, 15, CAT, Image(*size)).grid == (0, 0), "admission refuses it"
    assert ContentSegment(0, 15, CAT).grid == (0, 0)


def test_rows_and_columns_count_from_the_first_place_and_text_goes_on_behind_the_longer_side() -> None:
    contents = (image(2, 2, 3), image(9, 2, 1))
    time = [0, 1, *[2] * 6, 5, *[6] * 2, 8, 9]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9]
    width = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9]
    assert rope_positions(contents, 0, 13).tolist() == [time, height, width]
    assert rope_shift(contents) == time[-1] - 12


@pytest.mark.parametrize("start", range(13))
def test_positions_of_a_part_are_those_of_the_whole(start: int) -> None:
    contents = (image(2, 2, 3), image(9, 2, 1))
    whole = rope_positions(contents, 0, 13)
    for end in range(start + 1, 14):
        assert (rope_positions(contents, start, end) == whole[:, start:end]).all()
