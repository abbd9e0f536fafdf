"""What is done in pieces comes to the same as what is done at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_facts import MODEL_ID, facts

from diptych.common.members.roles import Role
from diptych.router.console.fleet.fleet_state import LinkMemo, fleet_state
from diptych.router.console.fleet.worker_facts import RouterFacts
from diptych.router.console.merge_patch import merge_patch, merged, without_nulls
from diptych.router.console.pieces import Pieces, at_once, encoded, merge_patch_of

NAMES = st.sampled_from("abc")
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3)
DOCUMENTS = st.dictionaries(
    NAMES,
    st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=12),
    max_size=3,
)


@given(DOCUMENTS, DOCUMENTS)
def test_the_patch_is_that_of_the_whole_documents(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    patch = at_once(merge_patch_of(old, new))
    assert patch == merge_patch(old, new)
    assert merged(without_nulls(old), patch) == without_nulls(new)


@given(DOCUMENTS)
def test_the_text_is_that_of_the_whole_document(document: Mapping[str, Any]) -> None:
    assert json.loads(at_once(encoded(document))) == document


def test_numbers_that_json_has_not_are_null() -> None:
    assert json.loads(at_once(encoded({"a": {"b": float("inf")}, "c": float("nan")}))) == {"a": {"b": None}, "c": None}


@pytest.mark.parametrize("number", [1, 64])
def test_the_work_on_a_fleet_has_pieces_for_each_worker(number: int) -> None:
    workers = [facts(each, Role.PREFILL) for each in range(1, number + 1)]
    here = RouterFacts(instance_id=7, version="1", model_id=MODEL_ID)
    document, num_made = counted(fleet_state(here, workers, LinkMemo()))
    patch, num_compared = counted(merge_patch_of({"workers": {}}, document))
    _, num_encoded = counted(encoded(patch))
    assert [num >= number for num in (num_made, num_compared, num_encoded)] == [True] * 3


def counted(work: Pieces[Any]) -> tuple[Any, int]:
    """What it makes, and in how many pieces."""
    number = 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, number
        number += 1
