from __future__ import annotations

from diptych.engine.embedded.dispatch.prefix_index import PrefixIndex


def test_only_leading_pages_match() -> None:
    index = PrefixIndex()
    index.insert([1, 2, 3])
    assert [index.match(hashes) for hashes in ([1, 2, 9], [1, 2, 3, 4], [9, 2, 3], [])] == [2, 3, 0, 0]


def test_the_oldest_prefix_is_forgotten_from_its_end() -> None:
    index = PrefixIndex(max_pages=4)
    index.insert([1, 2, 3])
    index.insert([7, 8])
    assert (index.match([1, 2, 3]), index.match([7, 8]), len(index)) == (2, 2, 4)


def test_a_prefix_in_use_stays() -> None:
    index = PrefixIndex(max_pages=3)
    index.insert([1])
    index.insert([2])
    index.insert([1, 3])
    index.insert([4])
    assert [index.match([page]) for page in (1, 2, 3, 4)] == [1, 0, 1, 1]
