from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta, NoChanges


def applied(delta: CacheDelta, listener: dict[int, int], moved: Collection[int]) -> dict[int, int]:
    """Return the level of each page that a listener knows. One that moved, and moved back, may be told again."""
    left = {} if delta.cleared else dict(listener)
    for page_hash in delta.removed:
        del left[page_hash]
    for level, hashes in delta.placed():
        assert all(left.get(page_hash) != level for page_hash in hashes if page_hash not in moved), "it is no news"
        left.update(dict.fromkeys(hashes, level))
    return left


def test_what_came_and_went_is_not_told() -> None:
    changes = CacheChanges()
    changes.store([1, 2, 3])
    changes.remove([2])
    assert changes.pop() == CacheDelta(stored=(1, 3))
    changes.remove([3, 1])
    changes.store([1])
    assert changes.pop() == CacheDelta(removed=(3,))
    assert not changes.pop()


def test_news_can_be_told_in_parts_removals_first() -> None:
    changes = CacheChanges()
    changes.store([1, 2])
    changes.pop()
    changes.remove([2, 1])
    changes.store([3, 4])
    assert [changes.pop(3), changes.pop(3)] == [CacheDelta(removed=(2, 1), stored=(3,)), CacheDelta(stored=(4,))]
    assert changes.is_empty


def test_clearing_cancels_what_was_not_told_yet() -> None:
    changes = CacheChanges()
    changes.store([1])
    changes.clear()
    changes.store([2])
    assert changes.pop() == CacheDelta(cleared=True, stored=(2,))


def test_nobody_listens() -> None:
    changes = NoChanges()
    changes.store([1])
    changes.remove([1])
    changes.clear()
    assert not changes.pop()


def test_a_page_that_moves_is_told_where_it_is_now_and_no_more() -> None:
    changes = CacheChanges()
    changes.store([1, 2])
    changes.move([2], 1)
    changes.store([3], 2)
    assert changes.pop() == CacheDelta(stored=(1,), below=((1, (2,)), (2, (3,))))
    changes.move([2], 0)
    changes.move([1], 1)
    changes.remove([1], 1)
    assert changes.pop() == CacheDelta(removed=(1,), stored=(2,))
    changes.remove([3], 2)
    changes.store([3], 2)
    assert changes.is_empty
    changes.remove([3], 2)
    changes.store([3])
    assert changes.pop() == CacheDelta(stored=(3,))


hashes = st.integers(0, 4)
moves = st.tuples(hashes, st.integers(0, 2))


@given(st.lists(hashes | st.sampled_from(["pop", "part", "clear"]) | moves))
def test_a_listener_ends_up_with_the_same_set(steps: list[int | str | tuple[int, int]]) -> None:
    """A number stores or removes that hash; two move the first to the level of the second."""
    changes, actual, listener, moved = CacheChanges(), dict[int, int](), dict[int, int](), set[int]()
    for step in [*steps, "pop"]:
        match step:
            case int() if step in actual:
                changes.remove([step], actual.pop(step))
            case int():
                changes.store([step])
                actual[step] = 0
            case (page_hash, level) if actual.get(page_hash, level) != level:
                changes.move([page_hash], level)
                moved.add(page_hash)
                actual[page_hash] = level
            case (_, _):
                pass
            case "clear":
                changes.clear()
                actual.clear()
            case "part":
                listener = applied(changes.pop(1), listener, moved)
            case _:
                listener = applied(changes.pop(), listener, moved)
                assert listener == actual
                assert changes.is_empty
