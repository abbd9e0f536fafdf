"""What a JSON text holds is counted before anything is made of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import InvalidRequest
from diptych.router.extents import json_extent
from diptych.router.extents.json_extent import (
    MAX_CONTAINERS,
    MAX_NAMES,
    MAX_VALUES,
    QUICK_BYTES,
    Extent,
    check_extent,
    is_quick,
)

TOO_MUCH = {
    "numbers": b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
    "lists": b"[" + b"[]," * MAX_CONTAINERS + b"1]",
    "objects": b"[" + b"{}," * MAX_CONTAINERS + b"1]",
    "depth": b"[" * (MAX_CONTAINERS + 1),
    "fields": b"{" + b",".join(b'"%x":1' % at for at in range(MAX_NAMES + 1)) + b"}",
    "behind a string": b'["' + b'\\\\\\",' * 2**17 + b'",' + b"[]," * MAX_CONTAINERS + b"1]",
}


@pytest.mark.parametrize("text", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_would_fill_the_memory_is_refused_with_the_limits(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1048576 values, 65536 fields and 65536 objects and lists"):
        check_extent(text)


@pytest.mark.parametrize("content", ["[{(,:", "{}[],:" + '"', "\\", '\\\\"{', "é,{"])
def test_marks_in_strings_are_text(content: str) -> None:
    text = json.dumps({"messages": [{"content": content * 2**20}]}, ensure_ascii=False).encode()
    check_extent(text)


VALUES = st.recursive(
    st.one_of(st.integers(0, 9), st.text('a",:[]{}\\\n')),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('a"\\:,'), inner, max_size=3)),
    max_leaves=20,
)


@fuzz
@given(VALUES, st.integers(1, 9))
def test_without_its_strings_a_text_has_as_many_marks_as_it_has_parts(value: Any, piece_bytes: int) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_extent, "_PIECE_BYTES", piece_bytes)
        pieces = list(json_extent._without_strings(text))
    found = json_extent._marks(b"".join(pieces))
    values, names, containers = counted(value)
    assert found == Extent(values, names, containers)


def counted(value: Any) -> tuple[int, int, int]:
    """How many values follow another one, names and containers there are."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    values, names, containers = (sum(column) for column in zip((0, 0, 0), *inner, strict=True))
    num_names = len(value) if isinstance(value, dict) else 0
    return values + max(0, len(value) - 1), names + num_names, containers + 1


def test_what_is_quick_is_short_and_simple() -> None:
    rng = random.Random(3)
    words = json.dumps({"prompt": "".join(rng.choices("abc ,{", k=1000))}).encode()
    chat = json.dumps({"messages": [{"content": "x" * (QUICK_BYTES // 2)}]}).encode()
    assert [is_quick(each) for each in (words, chat, chat * 2, b"{}," * 6000)] == [True, True, False, False]
