from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.generation import page_hash
from diptych.router.choose.page_chain import page_hashes

PAGE_SIZES = [*range(1, 40), 64, 127, 128, 129, 256, 512, 1000]  # the hash has a rule of its own for most lengths


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_have_the_names_that_workers_give_them(page_size: int) -> None:
    token_ids = np.random.default_rng(page_size).integers(0, 2**32, 7 * page_size + 3, np.uint32)
    for salt in (b"", b"tenant"):
        names = page_hash.page_hashes(token_ids.astype(np.int64), page_size, salt)
        assert page_hashes(token_ids, page_size, salt).tolist() == names.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 40), st.binary(max_size=9))
def test_whatever_the_tokens(token_ids: list[int], page_size: int, salt: bytes) -> None:
    names = page_hash.page_hashes(np.array(token_ids, np.int64), page_size, salt)
    assert page_hashes(np.array(token_ids, np.uint32), page_size, salt).tolist() == names.tolist()
