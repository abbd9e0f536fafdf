"""Rows of numbers in place of tokens: their names, and how they travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.codec import content_to_wire
from diptych.generation.embed_rows import EmbedRows, check_row_bytes, checked_rows, named, rows_of
from diptych.generation.leg_prompt import contents_of, prompt_len, prompt_of
from diptych.generation.page_hash import chain_hashes, root_hash
from diptych.generation.segments import content_of_row_bytes, content_of_rows, without_pixels
from diptych.v1.worker_pb2 import StartLeg

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


def test_rows_have_the_same_names_as_far_as_they_are_the_same_and_none_behind() -> None:
    other = ROWS.copy()
    other[3, 1] += 1
    first, second = content_of_rows(ROWS).keys, content_of_rows(other).keys
    assert (first[:3] == second[:3]).all()
    assert not (first[3:] == second[3:]).any()  # also where rows are the same again
    assert (first < 0).all()
    assert len(set(first.tolist())) == 6


def test_names_are_those_of_every_release() -> None:
    assert content_of_rows(ROWS[:2]).keys.tolist() == [-5633481708745075567, -4746264186877277662]


def test_rows_of_another_width_have_other_names() -> None:
    assert named(ROWS.tobytes(), 4)[0].names[:8] != named(ROWS.tobytes(), 8)[0].names[:8]


def test_bytes_of_rows_are_kept_as_they_are() -> None:
    content = content_of_row_bytes(data := ROWS.tobytes(), 4)
    assert content == content_of_rows(ROWS)
    assert content.rows is not None
    assert content.rows.data is data


def test_pages_are_named_by_all_rows_up_to_them() -> None:
    other = ROWS.copy()
    other[0, 0] = -1
    pages = [chain_hashes(root_hash(b""), content_of_rows(rows).keys, 2).tolist() for rows in (ROWS, other)]
    assert not set(pages[0]) & set(pages[1])


def test_rows_travel_with_their_segment_and_their_numbers_only_where_they_are_read() -> None:
    content = content_of_rows(ROWS)
    (read,) = contents_of(leg := StartLeg(contents=[content_to_wire(content)], prompt_token_ids=[7]))
    assert read == content
    assert read.rows is not None
    np.testing.assert_array_equal(read.rows.span(2, 5), ROWS[2:5])
    assert prompt_len(leg) == 7
    bare = without_pixels(content)
    (told,) = contents_of(leg := StartLeg(contents=[content_to_wire(bare)], prompt_token_ids=[7]))
    assert (told, told.is_computable, content.is_computable) == (bare, False, True)
    assert prompt_of(leg).tolist() == [*content.keys.tolist(), 7]


@pytest.mark.parametrize("change", [{"names": b"12345678"}, {"data": b"1234"}, {"width": 3}])
def test_a_leg_whose_rows_are_not_as_many_as_it_says_is_refused(change: Any) -> None:
    content = content_of_rows(ROWS)
    assert isinstance(content.rows, EmbedRows)
    wrong = replace(content, rows=replace(content.rows, **change))
    with pytest.raises(InvalidRequest):
        prompt_of(StartLeg(contents=[content_to_wire(wrong)]))


def test_rows_of_two_widths_are_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="row 1 of input_embeds has 1 numbers, and the first has 2"):
        rows_of([[1.0, 2.0], [1.0]])


@pytest.mark.parametrize("number", [1e39, -1e39, float("nan"), float("inf")])
def test_numbers_that_no_float32_holds_are_refused_in_words(number: float) -> None:
    for rows in (np.array([[1.0, number]]), rows_of([[1.0, number]])):
        with pytest.raises(InvalidRequest, match="no float32 holds"):
            checked_rows(rows)


@pytest.mark.parametrize(
    ("num_bytes", "width", "words"),
    [
        (8, 0, "the width of input_embeds is 0: give the numbers of a row"),
        (0, 2, "input_embeds has 0 bytes: rows of 2 float32 take 8 bytes each, and there is at least one"),
        (12, 2, "input_embeds has 12 bytes: "),
        (9, 2, "input_embeds has 9 bytes: "),
    ],
)
def test_bytes_that_are_no_rows_are_refused_in_words(num_bytes: int, width: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_row_bytes(bytes(num_bytes), width)


@pytest.mark.parametrize("rows", [np.zeros((2, 3), np.int64), np.zeros(4), np.zeros((0, 4)), np.zeros((1, 2, 3))])
def test_arrays_that_are_no_rows_are_refused_in_words(rows: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"give floats, \[num_rows, hidden_size\]"):
        checked_rows(rows)
