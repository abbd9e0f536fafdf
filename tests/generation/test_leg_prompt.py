"""The forms in which a prompt reaches a scheduler."""

from __future__ import annotations

from array import array

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.leg_prompt import prompt_len, prompt_of
from diptych.tokens.packed_tokens import pack
from diptych.v1.worker_pb2 import StartLeg


def test_packed_tokens_come_first() -> None:
    leg = StartLeg(prompt_tokens=pack([7, 2**32 - 1, 0]), prompt_token_ids=[5, 6])
    assert prompt_of(leg).tolist() == [7, 2**32 - 1, 0, 5, 6]
    assert prompt_len(leg) == 5
    assert prompt_of(StartLeg()).tolist() == []


def test_packing_takes_any_sequence() -> None:
    assert pack([1, 256]) == pack(array("I", [1, 256])) == b"\x01\0\0\0\0\x01\0\0"


@pytest.mark.parametrize("leg", [StartLeg(prompt_tokens=b"12345"), StartLeg(prompt_text="a", prompt_token_ids=[1])])
def test_what_is_no_prompt_yet_is_refused(leg: StartLeg) -> None:
    with pytest.raises(InvalidRequest):
        prompt_of(leg)
