from __future__ import annotations

import dataclasses

import pytest

from diptych.common.members.terms import FEATURES, Feature, Terms, bits, mismatch, terms_of, terms_to_wire

OURS = Terms("w", 100, "2 layers, 1 KV heads of 8", "ucx", 2, 2, FEATURES, bits(Feature.VERIFIED_HAND_OFF))


def ours(**changes: object) -> Terms:
    return dataclasses.replace(OURS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [OURS, ours(required_features=0), ours(features=FEATURES | 1 << 40)])
def test_workers_pair_when_each_has_what_the_other_requires(other: Terms) -> None:
    assert mismatch(OURS, other) == mismatch(other, OURS) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ours(weights="x"), "different weights"),
        (ours(vocab_size=200), "vocabularies of 100 and 200 tokens"),
        (ours(kv_shape="3 layers"), "KV of 2 layers, 1 KV heads of 8 and of 3 layers"),
        (ours(kv_backend="nixl"), "KV backends ucx and nixl"),
        (ours(features=0), "one requires verified hand off, which the other lacks"),
        (ours(required_features=1 << 17 | 1 << 40), "one requires feature 17 and feature 40, which the other lacks"),
        (
            ours(weights="x", oldest_protocol=3, newest_protocol=4),
            "different weights; protocol versions 2-2 and 3-4 do not overlap",
        ),
        (Terms(), "different weights; vocabularies of 100 and 0 tokens; KV of 2 layers, 1 KV heads of 8 and of ; "
         "KV backends ucx and ; protocol versions 2-2 and 0-0 do not overlap; "
         "one requires verified hand off, which the other lacks"),
    ],
)  # fmt: skip
def test_what_keeps_two_workers_apart_is_said_in_words(other: Terms, words: str) -> None:
    assert mismatch(OURS, other) == words
    assert mismatch(other, OURS) != ""


@pytest.mark.parametrize(("ranges", "overlap"), [(((1, 2), (2, 3)), True), (((1, 1), (2, 2)), False)])
def test_protocol_ranges_must_overlap(ranges: tuple[tuple[int, int], tuple[int, int]], overlap: bool) -> None:
    a, b = (ours(oldest_protocol=oldest, newest_protocol=newest) for oldest, newest in ranges)
    assert (mismatch(a, b) == "", mismatch(b, a) == "") == (overlap, overlap)


def test_compat_is_the_hash_of_what_must_be_equal_only() -> None:
    assert ours(oldest_protocol=1, newest_protocol=9, features=0, required_features=0).compat == OURS.compat
    changes = ({"weights": "x"}, {"vocab_size": 1}, {"kv_shape": ""}, {"kv_backend": ""})
    assert len({OURS.compat, *(ours(**change).compat for change in changes)}) == 5


def test_terms_come_back_from_the_wire() -> None:
    assert terms_of(terms_to_wire(OURS)) == OURS
