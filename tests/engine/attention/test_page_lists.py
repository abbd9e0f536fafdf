from __future__ import annotations

import numpy as np

from diptych.engine.attention.page_lists import page_lists


def test_the_pages_of_requests_follow_each_other_as_far_as_they_are_in_use() -> None:
    table = np.array([[7, 0, 0], [3, 5, 0], [2, 4, 6], [9, 8, 0]], np.int32)
    starts, indices, last_page_lens = page_lists(table, np.array([1, 8, 9, 5]), page_size=4)
    assert starts.tolist() == [0, 1, 3, 6, 8]
    assert indices.tolist() == [7, 3, 5, 2, 4, 6, 9, 8]
    assert last_page_lens.tolist() == [1, 4, 1, 1]
    assert {array.dtype for array in (starts, indices, last_page_lens)} == {np.dtype(np.int32)}


def test_a_row_of_padding_has_one_token_of_the_page_that_is_nobodys() -> None:
    starts, indices, last_page_lens = page_lists(np.array([[5], [0]], np.int32), np.array([4, 0]), page_size=4)
    assert (starts.tolist(), indices.tolist(), last_page_lens.tolist()) == ([0, 1, 2], [5, 0], [4, 1])
