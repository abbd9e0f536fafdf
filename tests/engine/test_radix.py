from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.common.errors import InvalidTransition
from diptych.engine.batch import I64
from diptych.engine.page_hash import page_hashes
from diptych.engine.radix import Insertion, Node, RadixTree
from diptych.kvtransfer.ownership import Pages

PAGE_SIZE = 2


@pytest.fixture
def tree() -> Iterator[RadixTree]:
    tree = RadixTree(PAGE_SIZE)
    yield tree
    assert tree.check() == []


def tokens(text: str) -> I64:
    return np.array([ord(letter) for letter in text], np.int64)


def page_list(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def matched(tree: RadixTree, text: str, salt: bytes = b"") -> list[int]:
    match = tree.match(tokens(text), salt)
    assert match.num_tokens == len(match.pages) * PAGE_SIZE
    return list(match.pages.tolist())


def shares(insertion: Insertion) -> tuple[list[int], list[int]]:
    return insertion.taken.tolist(), insertion.duplicate.tolist()


def test_an_empty_tree_matches_nothing(tree: RadixTree) -> None:
    assert matched(tree, "aabb") == []
    assert tree.evict(3).tolist() == []
    assert (tree.num_pages, tree.num_evictable) == (0, 0)


def test_a_match_is_the_longest_cached_prefix_of_whole_pages(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    assert matched(tree, "aabbccdd") == [1, 2, 3]
    assert matched(tree, "aabbc") == [1, 2]
    assert matched(tree, "aabxcc") == [1]
    assert matched(tree, "abbbcc") == []
    assert matched(tree, "a") == []
    assert matched(tree, "") == []


def test_prompts_that_part_share_the_pages_before(tree: RadixTree) -> None:
    assert shares(tree.insert(tokens("aabbcc"), page_list(1, 2, 3))) == ([1, 2, 3], [])
    assert shares(tree.insert(tokens("aabbdd"), page_list(1, 2, 4))) == ([4], [])
    assert matched(tree, "aabbcc") == [1, 2, 3]
    assert matched(tree, "aabbdd") == [1, 2, 4]
    assert tree.num_pages == 4


def test_a_page_computed_twice_stays_with_the_caller(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2))
    assert shares(tree.insert(tokens("aabbcc"), page_list(1, 5, 6))) == ([6], [5])
    assert matched(tree, "aabbcc") == [1, 2, 6]


def test_tokens_after_the_last_whole_page_are_not_cached(tree: RadixTree) -> None:
    tree.insert(tokens("aab"), page_list(1))
    assert matched(tree, "aab") == [1]
    assert shares(tree.insert(tokens("x"), page_list())) == ([], [])


@pytest.mark.parametrize("pages", [(), (1,), (1, 2, 3)])
def test_pages_and_tokens_must_be_of_one_length(tree: RadixTree, pages: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTransition):
        tree.insert(tokens("aabbc"), page_list(*pages))


def test_the_tree_keeps_its_own_copy_of_what_was_inserted(tree: RadixTree) -> None:
    token_ids, pages = tokens("aabb"), page_list(1, 2)
    tree.insert(token_ids, pages)
    token_ids[:], pages[:] = 0, 0
    assert matched(tree, "aabb") == [1, 2]


def test_salts_divide_the_cache(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2), b"one")
    assert matched(tree, "aabb", b"one") == [1, 2]
    assert matched(tree, "aabb", b"two") == []
    assert matched(tree, "aabb") == []


def test_no_salt_is_mistaken_for_tokens(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    assert matched(tree, "bbcc", tokens("aa").tobytes()) == []


def test_the_page_used_longest_ago_is_evicted_first(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.insert(tokens("ccdd"), page_list(3, 4))
    tree.insert(tokens("aaee"), page_list(1, 5))
    matched(tree, "ccdd")
    assert [tree.evict(1).tolist() for _ in range(6)] == [[2], [5], [1], [4], [3], []]


def test_eviction_takes_no_more_than_asked_from_the_end_of_a_run(tree: RadixTree) -> None:
    tree.insert(tokens("aabbccdd"), page_list(1, 2, 3, 4))
    assert tree.evict(2).tolist() == [3, 4]
    assert matched(tree, "aabbccdd") == [1, 2]


def test_a_locked_prefix_is_never_evicted(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    match = tree.match(tokens("aabb"))
    tree.lock(match.node)
    assert tree.num_evictable == 1
    assert tree.evict(3).tolist() == [3]
    assert matched(tree, "aabbcc") == [1, 2]
    tree.unlock(match.node)
    assert sorted(tree.evict(3).tolist()) == [1, 2]


def test_a_lock_survives_the_split_of_its_node(tree: RadixTree) -> None:
    node = tree.insert(tokens("aabbcc"), page_list(1, 2, 3)).node
    tree.lock(node)
    tree.insert(tokens("aadd"), page_list(1, 4))
    assert tree.evict(4).tolist() == [4]
    tree.unlock(node)
    assert tree.num_evictable == 3


def test_locks_are_counted(tree: RadixTree) -> None:
    node = tree.insert(tokens("aa"), page_list(1)).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(1).tolist() == []
    tree.unlock(node)
    with pytest.raises(InvalidTransition, match="not locked"):
        tree.unlock(node)
    assert tree.evict(1).tolist() == [1]


def test_the_empty_match_can_be_locked(tree: RadixTree) -> None:
    node = tree.match(tokens("aa")).node
    tree.lock(node)
    tree.unlock(node)


def test_an_evicted_node_cannot_be_locked(tree: RadixTree) -> None:
    node = tree.insert(tokens("aabb"), page_list(1, 2)).node
    tree.evict(1)
    with pytest.raises(InvalidTransition, match="evicted"):
        tree.lock(node)


def test_clear_leaves_what_is_locked(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.lock(tree.match(tokens("aa")).node)
    tree.insert(tokens("ccdd"), page_list(3, 4))
    assert sorted(tree.clear().tolist()) == [2, 3, 4]
    assert tree.pages().tolist() == [1]


def test_events_tell_net_changes(tree: RadixTree) -> None:
    first, second, third = page_hashes(tokens("aabbcc"), PAGE_SIZE).tolist()
    tree.insert(tokens("aabb"), page_list(1, 2))
    assert tree.drain_events() == ([first, second], [])
    tree.evict(1)
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    assert tree.drain_events() == ([third], [])
    assert tree.evict(1).tolist() == [3]
    tree.clear()
    assert tree.drain_events() == ([], [third, second, first])
    assert tree.drain_events() == ([], [])


def test_check_finds_wrong_books() -> None:
    tree = RadixTree(PAGE_SIZE)
    node = tree.insert(tokens("aabb"), page_list(1, 1)).node
    tree._num_pages, tree._num_evictable = 3, 4
    tree._unlocked.clear()
    node.key = b"?"
    assert tree.check() == [
        "a page is in two places",
        "2 pages are counted as 3",
        "2 evictable pages are counted as 4",
        "the queue is not the set of unlocked nodes",
        "Node(pages=[1, 1], num_locks=0) is not its parent's child",
    ]


Prefix = tuple[bytes, tuple[int, ...]]  # salt, tokens up to the end of a page

texts = st.lists(st.integers(0, 1), max_size=9)
salts = st.sampled_from([b"", b"\0"])


class TreeAgainstPrefixes(RuleBasedStateMachine):
    """Plays random operations on the tree and on a flat dict of prefixes; every answer must be the same.

    In the model each prefix has one page, a stamp of its last use and a lock count. Of two prefixes used at once the
    longer one counts as older: it must go first.
    """

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree(PAGE_SIZE)
        self.cached: dict[Prefix, int] = {}
        self.used: dict[Prefix, tuple[int, int]] = {}
        self.locks: Counter[Prefix] = Counter()
        self.held: list[tuple[Node, list[Prefix]]] = []
        self.listener: set[int] = set()
        self.num_pages_made = 0
        self.num_uses = 0

    @rule(text=texts, salt=salts)
    def match(self, text: list[int], salt: bytes) -> None:
        match = self.tree.match(np.array(text, np.int64), salt)
        prefixes = self.longest_cached(text, salt)
        assert match.pages.tolist() == [self.cached[prefix] for prefix in prefixes]
        assert match.num_tokens == len(prefixes) * PAGE_SIZE
        self.use(prefixes)

    @rule(text=texts, salt=salts, num_computed=st.integers(0, 2))
    def insert(self, text: list[int], salt: bytes, num_computed: int) -> None:
        """Insert as a request does: with the tree's pages, but for the last `num_computed` of them."""
        known, prefixes = self.longest_cached(text, salt), self.prefixes(text, salt)
        reused = [self.cached[prefix] for prefix in known[: max(0, len(known) - num_computed)]]
        own = [self.make_page() for _ in prefixes[len(reused) :]]
        insertion = self.tree.insert(np.array(text, np.int64), page_list(*reused, *own), salt)
        num_duplicate = len(known) - len(reused)
        assert shares(insertion) == (own[num_duplicate:], own[:num_duplicate])
        self.cached.update(zip(prefixes[len(known) :], own[num_duplicate:], strict=True))
        self.use(prefixes)

    @rule(text=texts, salt=salts)
    def lock(self, text: list[int], salt: bytes) -> None:
        node = self.tree.match(np.array(text, np.int64), salt).node
        prefixes = self.longest_cached(text, salt)
        self.use(prefixes)
        self.tree.lock(node)
        self.locks.update(prefixes)
        self.held.append((node, prefixes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, prefixes = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(node)
        self.locks.subtract(prefixes)
        self.use([prefix for prefix in prefixes if self.locks[prefix] == 0])

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        oldest = sorted(self.evictable(), key=self.used.__getitem__)[:num_pages]
        assert sorted(self.tree.evict(num_pages).tolist()) == sorted(self.cached.pop(prefix) for prefix in oldest)

    @rule()
    def clear(self) -> None:
        unlocked = self.evictable()
        assert sorted(self.tree.clear().tolist()) == sorted(self.cached.pop(prefix) for prefix in unlocked)

    @rule()
    def listen(self) -> None:
        stored, removed = self.tree.drain_events()
        assert self.listener.isdisjoint(stored)
        assert self.listener.issuperset(removed)
        self.listener = self.listener.union(stored).difference(removed)
        assert self.listener == {self.hash_of(prefix) for prefix in self.cached}

    @invariant()
    def the_tree_holds_the_cached_pages_and_is_sound(self) -> None:
        assert self.tree.check() == []
        assert sorted(self.tree.pages().tolist()) == sorted(self.cached.values())
        assert sorted(self.tree.hashes()) == sorted(self.hash_of(prefix) for prefix in self.cached)
        assert (self.tree.num_pages, self.tree.num_evictable) == (len(self.cached), len(self.evictable()))

    def prefixes(self, text: list[int], salt: bytes) -> list[Prefix]:
        return [(salt, tuple(text[:end])) for end in range(PAGE_SIZE, len(text) + 1, PAGE_SIZE)]

    def longest_cached(self, text: list[int], salt: bytes) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(text, salt) if prefix in self.cached]

    def evictable(self) -> list[Prefix]:
        return [prefix for prefix in self.cached if self.locks[prefix] == 0]

    def hash_of(self, prefix: Prefix) -> int:
        salt, token_ids = prefix
        return int(page_hashes(np.array(token_ids, np.int64), PAGE_SIZE, salt)[-1])

    def use(self, prefixes: list[Prefix]) -> None:
        self.num_uses += 1
        self.used.update({prefix: (self.num_uses, -len(prefix[1])) for prefix in prefixes})

    def make_page(self) -> int:
        self.num_pages_made += 1
        return self.num_pages_made


TestTreeAgainstPrefixes = TreeAgainstPrefixes.TestCase
TestTreeAgainstPrefixes.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
