from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.arrays import I64
from diptych.generation.page_hash import chain_hashes, extra_key, page_hashes, prompt_hash, root_hash


def tokens(*ids: int) -> I64:
    return np.array(ids, np.int64)


token_arrays = st.lists(st.integers(0, 2**40), max_size=20).map(lambda ids: tokens(*ids))
page_sizes = st.integers(1, 5)
salts = st.binary(max_size=9)


def test_hashes_are_the_same_in_every_release() -> None:
    """Workers and routers of different releases meet on the wire."""
    assert page_hashes(np.arange(8), 4).tolist() == [0xFE937A120BF0F911, 0x8403FD6AB362856D]
    assert page_hashes(np.arange(8), 4, b"tenant").tolist() == [0x0EA2CB7449A0C990, 0x13EC21D89535780B]
    assert prompt_hash(np.arange(8)) == 0xDEAF98923C3A4791


@given(token_arrays, page_sizes, salts)
def test_each_page_is_hashed_with_the_hash_before_it_as_seed(token_ids: I64, page_size: int, salt: bytes) -> None:
    expected, previous = [], xxhash.xxh3_64_intdigest(salt)
    for end in range(page_size, len(token_ids) + 1, page_size):
        page = b"".join(token.to_bytes(8, "little") for token in token_ids[end - page_size : end].tolist())
        previous = xxhash.xxh3_64_intdigest(page, previous)
        expected.append(previous)
    assert page_hashes(token_ids, page_size, salt).tolist() == expected


@given(token_arrays, page_sizes, salts, st.integers(0, 20))
def test_a_known_prefix_is_extended_from_its_last_hash(token_ids: I64, page_size: int, salt: bytes, cut: int) -> None:
    num_known = min(cut, len(token_ids) // page_size)
    known = page_hashes(token_ids[: num_known * page_size], page_size, salt).tolist()
    last = known[-1] if known else root_hash(salt)
    rest = chain_hashes(last, token_ids[num_known * page_size :], page_size).tolist()
    assert known + rest == page_hashes(token_ids, page_size, salt).tolist()


@given(token_arrays.filter(len), page_sizes, st.data())
def test_a_changed_token_changes_its_page_and_every_later_one(
    token_ids: I64, page_size: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(token_ids) - 1))
    changed = token_ids.copy()
    changed[position] += 1
    same = page_hashes(token_ids, page_size) == page_hashes(changed, page_size)
    assert same.tolist() == [page < position // page_size for page in range(len(token_ids) // page_size)]
    assert prompt_hash(token_ids) != prompt_hash(changed)


@given(token_arrays.filter(lambda ids: len(ids) >= 5), page_sizes, salts, salts)
def test_prompts_with_different_salts_share_no_hash(token_ids: I64, page_size: int, one: bytes, other: bytes) -> None:
    shared = set(page_hashes(token_ids, page_size, one).tolist()) & set(
        page_hashes(token_ids, page_size, other).tolist()
    )
    assert bool(shared) == (one == other)
    assert (prompt_hash(token_ids, one) == prompt_hash(token_ids, other)) == (one == other)


@pytest.mark.parametrize("view", [np.arange(20)[::2], np.arange(20)[::-1], np.arange(20, dtype=np.int32)])
def test_the_layout_of_the_array_does_not_matter(view: I64) -> None:
    assert page_hashes(view, 4).tolist() == page_hashes(tokens(*view.tolist()), 4).tolist()
    assert prompt_hash(view) == prompt_hash(tokens(*view.tolist()))


def test_the_prompt_hash_covers_the_last_partial_page_too() -> None:
    assert page_hashes(np.arange(9), 4).tolist() == page_hashes(np.arange(8), 4).tolist()
    assert prompt_hash(np.arange(9)) != prompt_hash(np.arange(8))


@given(salts, st.text(max_size=5), salts, st.text(max_size=5))
def test_a_namespace_is_one_salt_with_one_adapter(salt: bytes, lora: str, other_salt: bytes, other_lora: str) -> None:
    same = (salt, lora) == (other_salt, other_lora)
    assert (extra_key(salt, lora) == extra_key(other_salt, other_lora)) == same


def test_a_salt_cannot_pose_as_an_adapter() -> None:
    assert extra_key(b"", "") == b""
    assert extra_key(extra_key(b"", "adapter"), "") != extra_key(b"", "adapter")
