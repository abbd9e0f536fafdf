"""Tokens of prompts, as programs give them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from diptych.common.errors import InvalidRequest
from diptych.embedded.prompt_tokens import packed_ids
from diptych.tokens.packed_tokens import TOKEN_TYPE


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 0, -1),
        array("q", [3, 1, 2]),
        np.array([3, 1, 2]),
        np.array([3, 0, 1, 0, 2], np.int16)[::2],
        np.array([3, 1, 2], np.uint64),
        list(np.array([3, 1, 2])),
        list(torch.tensor([3, 1, 2])),
    ],
    ids=["list", "tuple", "range", "array", "int64", "strides", "uint64", "numpy's", "torch's"],
)
def test_numbers_of_any_kind_are_packed(prompt: Any) -> None:
    found = packed_ids(prompt)
    assert found.typecode == TOKEN_TYPE
    assert found.tolist() == [int(each) for each in prompt]


@pytest.mark.parametrize("prompt", [[], (), np.zeros(0, np.int64)])
def test_none_is_left_to_who_says_what_an_empty_prompt_is(prompt: Any) -> None:
    assert len(packed_ids(prompt)) == 0


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([7, -1], r"prompt\[1\] is below 0"),
        ([1 << 70], r"prompt\[0\] is above 4294967295"),
        ([1 << 100_000], r"prompt\[0\] is above 4294967295"),
        (np.array([1, 2, 1 << 63], np.uint64), r"prompt\[2\] is above 4294967295"),
        (np.array([1, -2]), r"prompt\[1\] is below 0"),
        ([1.0, 2.0], r"prompt\[0\] is a float"),
        ([5, "a"], r"prompt\[1\] is a str"),
        ([1, None], r"prompt\[1\] is a NoneType"),
        ([torch.zeros(4)] * 3, r"prompt\[0\] is a Tensor.*numpy.stack"),
        ((torch.zeros(3, 4),), r"prompt\[0\] is a Tensor"),
        (list(np.zeros((3, 4), np.float32)), r"prompt\[0\] is a ndarray.*numpy.stack"),
        ([[0.0] * 4] * 3, r"prompt\[0\] is a list.*numpy.stack"),
        (b"abcd", "not a bytes"),
        (bytearray(b"abcd"), "not a bytearray"),
        (None, "not a NoneType"),
        (7, "not a int"),
        (torch.tensor([1, 2]), r"not a Tensor: give rows as tensor.float\(\).cpu\(\).numpy\(\)"),
    ],
)
def test_what_is_no_token_is_refused_by_its_place(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        packed_ids(prompt)
