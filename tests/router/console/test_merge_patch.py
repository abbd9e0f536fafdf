"""Patches of documents: random ones say exactly what has changed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.console.merge_patch import merge_patch, merged, without_nulls

NAMES = st.sampled_from("abc")
LEAVES = st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 3) | st.text("xy", max_size=2)
LISTS = st.lists(st.none() | st.text("xy", max_size=1), max_size=3)
DOCUMENTS = st.recursive(
    st.dictionaries(NAMES, LEAVES | LISTS), lambda inner: st.dictionaries(NAMES, inner | LEAVES | LISTS), max_leaves=20
)


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_new_document_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert without_nulls(merged(old, merge_patch(old, new))) == without_nulls(new)


@given(DOCUMENTS, DOCUMENTS)
def test_without_nulls_it_is_exact(old: dict[str, Any], new: dict[str, Any]) -> None:
    old, new = without_nulls(old), without_nulls(new)
    assert merged(old, merge_patch(old, new)) == new


@given(DOCUMENTS)
def test_the_same_document_needs_no_patch(document: dict[str, Any]) -> None:
    assert merge_patch(document, without_nulls(document)) == {}
    assert merge_patch(without_nulls(document), document) == {}


def test_only_what_changed_is_in_the_patch() -> None:
    old = {"workers": {"1": {"queue_s": 0.5, "links": {"2": {"state": "up"}}}, "2": {"queue_s": 1}, "3": {}}}
    new = {"workers": {"1": {"queue_s": None, "links": {"2": {"state": "down"}}}, "2": {"queue_s": 1}, "4": {}}}
    patch = {"workers": {"1": {"queue_s": None, "links": {"2": {"state": "down"}}}, "3": None, "4": {}}}
    assert merge_patch(old, new) == patch


def test_a_list_is_replaced_and_keeps_its_nulls() -> None:
    old, new = {"values": [1.0, None]}, {"values": [None, 1.0]}
    assert merge_patch(old, new) == {"values": [None, 1.0]}
    assert merged(old, merge_patch(old, new)) == new


def test_neither_document_is_changed() -> None:
    old: dict[str, Any] = {"a": {"b": 1}}
    new: dict[str, Any] = {"a": {"c": 2}}
    merged(old, merge_patch(old, new))
    assert (old, new) == ({"a": {"b": 1}}, {"a": {"c": 2}})
