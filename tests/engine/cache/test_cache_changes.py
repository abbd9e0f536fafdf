from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta, NoChanges


def applied(delta: CacheDelta, listener: set[int]) -> set[int]:
    listener = set() if delta.cleared else listener
    assert listener.isdisjoint(delta.stored)
    assert listener.issuperset(delta.removed)
    return listener.difference(delta.removed).union(delta.stored)


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


@given(st.lists(st.integers(0, 4) | st.sampled_from(["pop", "part", "clear"])))
def test_a_listener_ends_up_with_the_same_set(steps: list[int | str]) -> None:
    """A number stores or removes that hash."""
    changes, actual, listener = CacheChanges(), set[int](), set[int]()
    for step in [*steps, "pop"]:
        match step:
            case int():
                (changes.remove if step in actual else changes.store)([step])
                actual ^= {step}
            case "clear":
                changes.clear()
                actual.clear()
            case "part":
                listener = applied(changes.pop(1), listener)
            case _:
                listener = applied(changes.pop(), listener)
                assert listener == actual
                assert changes.is_empty
