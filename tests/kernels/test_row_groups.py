"""Which rows attend together: those of one request, so many at most."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.kernels.row_groups import row_groups


@pytest.mark.parametrize(
    ("row_lens", "most", "firsts", "counts"),
    [
        ([1, 1, 1], 4, [0, 1, 2], [1, 1, 1]),
        ([5, 1, 4], 4, [0, 4, 5, 6, 0, 0, 0, 0, 0, 0], [4, 1, 1, 4, 0, 0, 0, 0, 0, 0]),
        ([3, 2], 1, [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]),
        ([8], 4, [0, 4, 0, 0, 0, 0, 0, 0], [4, 4, 0, 0, 0, 0, 0, 0]),
        ([], 4, [], []),
    ],
)
def test_rows_of_a_request_are_cut_into_groups(
    row_lens: list[int], most: int, firsts: list[int], counts: list[int]
) -> None:
    found = row_groups(np.array(row_lens, np.int64), most)
    assert [each.tolist() for each in found] == [firsts, counts]
