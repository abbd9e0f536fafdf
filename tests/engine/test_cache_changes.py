from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.batch import U64
from diptych.engine.cache_changes import CacheChanges


def hashes(*values: int) -> U64:
    return np.array(values, np.uint64)


def test_what_came_and_went_is_not_told() -> None:
    changes = CacheChanges()
    changes.store(hashes(1, 2, 3))
    changes.remove(hashes(2))
    assert changes.drain() == ([1, 3], [])
    changes.remove(hashes(3, 1))
    changes.store(hashes(1))
    assert changes.drain() == ([], [3])
    assert changes.drain() == ([], [])


@given(st.lists(st.integers(0, 4) | st.none()))
def test_a_listener_ends_up_with_the_same_set(toggled: list[int | None]) -> None:
    """A number stores or removes that hash; None lets the listener drain."""
    changes, actual, listener = CacheChanges(), set[int](), set[int]()
    for value in [*toggled, None]:
        if value is None:
            stored, removed = changes.drain()
            assert listener.isdisjoint(stored)
            assert listener.issuperset(removed)
            listener = listener.union(stored).difference(removed)
            assert listener == actual
        else:
            (changes.remove if value in actual else changes.store)(hashes(value))
            actual ^= {value}
