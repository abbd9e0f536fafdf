from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.common.arrays import I64
from diptych.common.errors import InvalidTransition
from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta
from diptych.engine.cache.tier import POOL, SlotPool
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Eviction, Insertion, Node
from diptych.engine.values.policy_names import EvictionPolicy
from diptych.generation.image_rows import row_namespace
from diptych.generation.page_hash import page_hashes
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


def matched(tree: RadixTree, text: str, extra_key: bytes = b"") -> list[int]:
    match = tree.match(tokens(text), extra_key)
    assert match.num_tokens == len(match.pages) * PAGE_SIZE
    return list(match.pages.tolist())


def saves(eviction: Eviction) -> list[tuple[int, list[int], list[int]]]:
    return [(save.level, save.places.tolist(), save.slots.tolist()) for save in eviction.saves]


def shares(insertion: Insertion) -> tuple[list[int], list[int]]:
    return insertion.adopted.tolist(), insertion.duplicate.tolist()


def test_an_empty_tree_matches_nothing(tree: RadixTree) -> None:
    assert matched(tree, "aabb") == []
    assert tree.evict(3).pages.tolist() == []
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


def test_extra_keys_divide_the_cache(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2), b"one")
    assert matched(tree, "aabb", b"one") == [1, 2]
    assert matched(tree, "aabb", b"two") == []
    assert matched(tree, "aabb") == []


def test_no_extra_key_is_mistaken_for_tokens(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    assert matched(tree, "bbcc", tokens("aa").tobytes()) == []


def test_the_page_used_longest_ago_is_evicted_first(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.insert(tokens("ccdd"), page_list(3, 4))
    tree.insert(tokens("aaee"), page_list(1, 5))
    matched(tree, "ccdd")
    assert [tree.evict(1).pages.tolist() for _ in range(6)] == [[2], [5], [1], [4], [3], []]


def test_eviction_takes_no_more_than_asked_from_the_end_of_a_run(tree: RadixTree) -> None:
    tree.insert(tokens("aabbccdd"), page_list(1, 2, 3, 4))
    assert tree.evict(2).pages.tolist() == [3, 4]
    assert matched(tree, "aabbccdd") == [1, 2]


def test_a_locked_prefix_is_never_evicted(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    match = tree.match(tokens("aabb"))
    tree.lock(match.node)
    assert tree.num_evictable == 1
    assert tree.evict(3).pages.tolist() == [3]
    assert matched(tree, "aabbcc") == [1, 2]
    tree.unlock(match.node)
    assert sorted(tree.evict(3).pages.tolist()) == [1, 2]


def test_a_lock_survives_the_split_of_its_node(tree: RadixTree) -> None:
    node = tree.insert(tokens("aabbcc"), page_list(1, 2, 3)).node
    tree.lock(node)
    tree.insert(tokens("aadd"), page_list(1, 4))
    assert tree.evict(4).pages.tolist() == [4]
    tree.unlock(node)
    assert tree.num_evictable == 3


def test_locks_are_counted(tree: RadixTree) -> None:
    node = tree.insert(tokens("aa"), page_list(1)).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(1).pages.tolist() == []
    tree.unlock(node)
    with pytest.raises(InvalidTransition, match="not locked"):
        tree.unlock(node)
    assert tree.evict(1).pages.tolist() == [1]


def test_the_empty_match_can_be_locked(tree: RadixTree) -> None:
    node = tree.match(tokens("aa")).node
    tree.lock(node)
    tree.unlock(node)


def test_an_evicted_node_cannot_be_locked(tree: RadixTree) -> None:
    node = tree.insert(tokens("aabb"), page_list(1, 2)).node
    tree.evict(1)
    with pytest.raises(InvalidTransition, match="evicted"):
        tree.lock(node)


def test_what_is_left_of_a_node_that_lost_its_end_goes_on_as_it_was(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    tree.insert(tokens("dd"), page_list(4))
    assert tree.evict(1).pages.tolist() == [3], "of the text that was used least lately"
    assert matched(tree, "aabbcc") == [1, 2]
    assert (tree.num_pages, tree.num_evictable) == (3, 3)
    tree.insert(tokens("aabbee"), page_list(1, 2, 5))
    assert tree.evict(1).pages.tolist() == [4], "the other one has been used since"
    assert tree.evict(3).pages.tolist() == [5, 1, 2]
    assert tree.num_pages == 0


def test_pages_get_the_names_that_are_known(tree: RadixTree) -> None:
    root = tree.match(tokens("")).node
    first = tree.extend(root, tokens("aabb"), page_list(1, 2), names=[7, 2**64 - 1]).node
    assert sorted(tree.hashes()) == [7, 2**64 - 1]
    tree.use(tree.extend(first, tokens("aabbccdd"), page_list(3, 4), names=[7, 2**64 - 1, 9]).node)
    assert len(tree.hashes()) == 4
    assert 9 not in tree.hashes(), "one that is not known follows: both are made anew"


def test_clear_leaves_what_is_locked(tree: RadixTree) -> None:
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.lock(tree.match(tokens("aa")).node)
    tree.insert(tokens("ccdd"), page_list(3, 4))
    assert sorted(tree.clear().tolist()) == [2, 3, 4]
    assert tree.pages().tolist() == [1]


def test_a_peek_finds_what_a_match_would_and_changes_nothing(tree: RadixTree) -> None:
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    tree.insert(tokens("xx"), page_list(4), b"one")
    assert [tree.peek(tokens(text)) for text in ("aabbccdd", "aabxcc", "a", "xx")] == [6, 2, 0, 0]
    assert tree.peek(tokens("xxyy"), b"one") == 2
    assert tree.evict(1).pages.tolist() == [3]


def test_a_look_at_less_of_a_text_finds_less() -> None:
    tree = RadixTree(PAGE_SIZE)
    tree.insert(tokens("aabb"), page_list(1, 2))
    known = tree.match(tokens("aabb")).node
    assert [tree.peek(tokens(text), known=known) for text in ("aabbcc", "aabb", "aab", "a")] == [4, 4, 2, 0]
    assert tree.match(tokens("aab"), known=known).num_tokens == 2


def test_the_least_used_page_is_evicted_first_under_lfu() -> None:
    tree = RadixTree(PAGE_SIZE, policy="lfu")
    for _ in range(3):
        tree.insert(tokens("aa"), page_list(1))
    tree.insert(tokens("bb"), page_list(2))
    assert matched(tree, "bb") == [2]
    assert [tree.evict(1).pages.tolist() for _ in range(2)] == [[2], [1]]


def test_popularity_ages_under_lfu() -> None:
    tree = RadixTree(PAGE_SIZE, policy="lfu")
    for _ in range(3):
        tree.insert(tokens("aa"), page_list(1))
    evicted = []
    for _ in range(2):
        for _ in range(2):  # used less often than "aa", but later
            tree.insert(tokens("bb"), page_list(2))
        evicted.append(tree.evict(1).pages.tolist())
    assert evicted == [[2], [1]]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_hot_prompt_survives_a_scan_under_lfu_only(policy: EvictionPolicy) -> None:
    tree = RadixTree(PAGE_SIZE, policy=policy)
    for _ in range(5):
        tree.insert(tokens("aa"), page_list(1))
    for page, text in enumerate(("bb", "cc", "dd"), start=2):
        tree.insert(tokens(text), page_list(page))
    tree.evict(2)
    assert matched(tree, "aa") == ([1] if policy == "lfu" else [])


def test_changes_are_told_net() -> None:
    changes = CacheChanges()
    tree = RadixTree(PAGE_SIZE, changes=changes)
    first, second, third = page_hashes(tokens("aabbcc"), PAGE_SIZE).tolist()
    tree.insert(tokens("aabb"), page_list(1, 2))
    assert changes.pop() == CacheDelta(stored=(first, second))
    tree.evict(1)
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    assert changes.pop() == CacheDelta(stored=(third,))
    assert tree.evict(1).pages.tolist() == [3]
    assert changes.pop() == CacheDelta(removed=(third,))
    tree.lock(tree.match(tokens("aa")).node)
    tree.clear()
    assert changes.pop() == CacheDelta(cleared=True, stored=(first,))
    assert changes.is_empty


def test_the_deep_end_of_a_run_is_told_as_removed_first() -> None:
    """Whoever has heard only a part of it then has a whole prefix."""
    changes = CacheChanges()
    tree = RadixTree(PAGE_SIZE, changes=changes)
    first, second, third = page_hashes(tokens("aabbcc"), PAGE_SIZE).tolist()
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    changes.pop()
    tree.evict(3)
    assert [changes.pop(2).removed, changes.pop().removed] == [(third, second), (first,)]


def test_a_page_in_the_host_tier_is_still_cached() -> None:
    changes = CacheChanges()
    tree = RadixTree(PAGE_SIZE, tiers=[SlotPool(2)], changes=changes)
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    _, *others = changes.pop().stored
    eviction = tree.evict(2)
    assert (eviction.pages.tolist(), saves(eviction)) == ([2, 3], [(1, [2, 3], [0, 1])])
    assert changes.pop() == CacheDelta(below=((1, tuple(others)),))
    match = tree.match(tokens("aabbcc"))
    assert (match.pages.tolist(), match.num_lower_pages) == ([1], 2)
    assert tree.peek(tokens("aabbcc")) == 6
    tree.lock(match.node)
    assert [node.pages.tolist() for node in match.lower_nodes] == [[0, 1]]
    tree.promote(match.lower_nodes, page_list(7, 8))
    assert changes.pop() == CacheDelta(stored=tuple(others))
    tree.unlock(match.node)
    assert matched(tree, "aabbcc") == [1, 7, 8]
    assert tree.check() == []


def test_what_the_host_tier_has_no_room_for_is_forgotten_from_the_end() -> None:
    tree = RadixTree(PAGE_SIZE, tiers=[SlotPool(2)])
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3))
    eviction = tree.evict(3)
    assert (eviction.pages.tolist(), saves(eviction)) == ([1, 2, 3], [(1, [1, 2], [0, 1])])
    assert tree.peek(tokens("aabbcc")) == 4
    tree.insert(tokens("dd"), page_list(4))
    assert saves(tree.evict(1)) == [(1, [4], [1])]
    assert (tree.peek(tokens("aabbcc")), tree.peek(tokens("dd")), tree.num_host_pages) == (2, 2, 2)
    assert tree.check() == []


def test_rows_of_images_are_dropped_and_not_demoted() -> None:
    """Steps and pulls look for them in the pool: in a tier nobody would read them, nor have them sent again."""
    tree, rows = RadixTree(PAGE_SIZE, tiers=[SlotPool(4)]), row_namespace(b"salt", "bfloat16")
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3), rows)
    assert tree.peek(tokens("aabbcc"), rows) == 6
    tree.insert(tokens("aabbdd"), page_list(1, 2, 4), rows)  # so that the node is split
    assert saves(tree.evict(4)) == []
    assert (tree.peek(tokens("aabbcc"), rows), tree.num_host_pages, tree.check()) == (0, 0, [])
    tree.insert(tokens("aabbcc"), page_list(1, 2, 3), b"salt")
    assert saves(tree.evict(3)) != []
    assert tree.num_host_pages == 3


def test_a_page_computed_again_replaces_its_copy_in_the_host_tier() -> None:
    tree = RadixTree(PAGE_SIZE, tiers=[SlotPool(2)])
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.evict(2)
    assert shares(tree.insert(tokens("aabbcc"), page_list(5, 6, 7))) == ([5, 6, 7], [])
    assert matched(tree, "aabbcc") == [5, 6, 7]
    assert tree.num_host_pages == 0
    assert tree.check() == []


def test_clear_empties_the_host_tier_too() -> None:
    tree = RadixTree(PAGE_SIZE, tiers=[SlotPool(2)])
    tree.insert(tokens("aabb"), page_list(1, 2))
    tree.evict(1)
    assert tree.clear().tolist() == [1]
    assert (tree.num_host_pages, tree.hashes(), tree.check()) == (0, [], [])


def test_check_finds_wrong_books() -> None:
    tree = RadixTree(PAGE_SIZE)
    node = tree.insert(tokens("aabb"), page_list(1, 1)).node
    tree._num_pages, tree._num_evictable = 3, 4
    tree._queues[POOL].pop()
    node.key = b"?"
    assert tree.check() == [
        "a page is in two places",
        "2 pages are counted as 3",
        "2 evictable pages are counted as 4",
        "Node(level=0 pages=[1, 1], num_locks=0) is not its parent's child",
        "an unlocked node is in no queue",
    ]


Prefix = tuple[bytes, tuple[int, ...]]  # extra key, tokens up to the end of a page

texts = st.lists(st.integers(0, 1), max_size=9)
extra_keys = st.sampled_from([b"", b"\0"])


class TreeAgainstPrefixes(RuleBasedStateMachine):
    """Plays random operations on the tree and on a flat dict of prefixes; every answer must be the same.

    In the model each prefix has one page, a lock count, a use count and a rank. Of two prefixes touched at once the
    longer one ranks lower: it must go first.
    """

    policy: EvictionPolicy = "lru"

    @initialize()
    def start(self) -> None:
        self.changes = CacheChanges()
        self.tree = RadixTree(PAGE_SIZE, policy=self.policy, changes=self.changes)
        self.cached: dict[Prefix, int] = {}
        self.ranks: dict[Prefix, tuple[int, int, int]] = {}
        self.uses: Counter[Prefix] = Counter()
        self.locks: Counter[Prefix] = Counter()
        self.held: list[tuple[Node, list[Prefix]]] = []
        self.looked_for: list[tuple[list[int], bytes, Node]] = []  # and where that led to
        self.listener: set[int] = set()
        self.num_pages_made = 0
        self.num_touches = 0
        self.age = 0

    @rule(text=texts, extra_key=extra_keys)
    def match(self, text: list[int], extra_key: bytes) -> None:
        assert self.tree.peek(np.array(text, np.int64), extra_key) == self.num_cached_tokens(text, extra_key)
        match = self.tree.match(np.array(text, np.int64), extra_key)
        prefixes = self.longest_cached(text, extra_key)
        assert match.pages.tolist() == [self.cached[prefix] for prefix in prefixes]
        assert match.num_tokens == self.num_cached_tokens(text, extra_key)
        self.touch(prefixes)
        self.looked_for.append((text, extra_key, match.node))

    @precondition(lambda self: self.looked_for)
    @rule(data=st.data(), more=texts, num_fewer=st.integers(0, 3))
    def match_again(self, data: st.DataObject, more: list[int], num_fewer: int) -> None:
        """Go on from where an earlier look has ended, whatever has come of that node."""
        text, extra_key, known = data.draw(st.sampled_from(self.looked_for))
        whole = np.array([*text, *more], np.int64)
        token_ids = whole[: max(0, len(whole) - num_fewer)]
        prefixes = self.longest_cached(token_ids.tolist(), extra_key)
        assert self.tree.peek(token_ids, extra_key, known) == len(prefixes) * PAGE_SIZE
        match = self.tree.match(token_ids, extra_key, known=known)
        assert match.pages.tolist() == [self.cached[prefix] for prefix in prefixes]
        self.touch(prefixes)

    @rule(text=texts, extra_key=extra_keys, num_computed=st.integers(0, 2))
    def insert(self, text: list[int], extra_key: bytes, num_computed: int) -> None:
        """Insert as a request does: with the tree's pages, but for the last `num_computed` of them."""
        known, prefixes = self.longest_cached(text, extra_key), self.prefixes(text, extra_key)
        reused = [self.cached[prefix] for prefix in known[: max(0, len(known) - num_computed)]]
        own = [self.make_page() for _ in prefixes[len(reused) :]]
        insertion = self.tree.insert(np.array(text, np.int64), page_list(*reused, *own), extra_key)
        num_duplicate = len(known) - len(reused)
        assert shares(insertion) == (own[num_duplicate:], own[:num_duplicate])
        self.cached.update(zip(prefixes[len(known) :], own[num_duplicate:], strict=True))
        self.uses.update(prefixes)
        self.touch(prefixes)

    @rule(text=texts, extra_key=extra_keys)
    def lock(self, text: list[int], extra_key: bytes) -> None:
        node = self.tree.match(np.array(text, np.int64), extra_key).node
        prefixes = self.longest_cached(text, extra_key)
        self.touch(prefixes)
        self.tree.lock(node)
        self.locks.update(prefixes)
        self.held.append((node, prefixes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, prefixes = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(node)
        self.locks.subtract(prefixes)
        self.touch([prefix for prefix in prefixes if self.locks[prefix] == 0])

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        lowest = sorted(self.evictable(), key=self.ranks.__getitem__)[:num_pages]
        expected = sorted(self.forget(prefix) for prefix in lowest)
        assert sorted(self.tree.evict(num_pages).pages.tolist()) == expected
        self.age = max([self.age, *(self.ranks[prefix][0] for prefix in lowest)])

    @rule()
    def clear(self) -> None:
        unlocked = self.evictable()
        assert sorted(self.tree.clear().tolist()) == sorted(self.forget(prefix) for prefix in unlocked)

    @rule()
    def listen(self) -> None:
        delta = self.changes.pop()
        if delta.cleared:
            self.listener.clear()
        assert self.listener.isdisjoint(delta.stored)
        assert self.listener.issuperset(delta.removed)
        self.listener = self.listener.union(delta.stored).difference(delta.removed)
        assert self.listener == {self.hash_of(prefix) for prefix in self.cached}

    @invariant()
    def the_tree_holds_the_cached_pages_and_is_sound(self) -> None:
        assert self.tree.check() == []
        assert sorted(self.tree.pages().tolist()) == sorted(self.cached.values())
        assert sorted(self.tree.hashes()) == sorted(self.hash_of(prefix) for prefix in self.cached)
        assert (self.tree.num_pages, self.tree.num_evictable) == (len(self.cached), len(self.evictable()))

    def prefixes(self, text: list[int], extra_key: bytes) -> list[Prefix]:
        return [(extra_key, tuple(text[:end])) for end in range(PAGE_SIZE, len(text) + 1, PAGE_SIZE)]

    def longest_cached(self, text: list[int], extra_key: bytes) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(text, extra_key) if prefix in self.cached]

    def num_cached_tokens(self, text: list[int], extra_key: bytes) -> int:
        return len(self.longest_cached(text, extra_key)) * PAGE_SIZE

    def evictable(self) -> list[Prefix]:
        return [prefix for prefix in self.cached if self.locks[prefix] == 0]

    def forget(self, prefix: Prefix) -> int:
        self.uses[prefix] = 0
        return self.cached.pop(prefix)

    def hash_of(self, prefix: Prefix) -> int:
        extra_key, token_ids = prefix
        return int(page_hashes(np.array(token_ids, np.int64), PAGE_SIZE, extra_key)[-1])

    def touch(self, prefixes: list[Prefix]) -> None:
        self.num_touches += 1
        for prefix in prefixes:
            score = self.uses[prefix] + self.age if self.policy == "lfu" else 0
            self.ranks[prefix] = (score, self.num_touches, -len(prefix[1]))

    def make_page(self) -> int:
        self.num_pages_made += 1
        return self.num_pages_made


class LfuTreeAgainstPrefixes(TreeAgainstPrefixes):
    policy = "lfu"


TestTreeAgainstPrefixes = TreeAgainstPrefixes.TestCase
TestTreeAgainstPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLfuTreeAgainstPrefixes = LfuTreeAgainstPrefixes.TestCase
TestLfuTreeAgainstPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
