"""Pages of layers with a window beside cached text: found where they are whole, split with it, evicted if spare."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from diptych.common.arrays import I32, I64
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.window_pages import WindowPages

PAGE = 2
WINDOWS = WindowPages(2, 4)  # behind an end are its last two pages live
Prefix = tuple[int, ...]  # the tokens up to the end of a page


def tokens(text: str) -> I64:
    """Each letter is a page."""
    return np.repeat([ord(letter) for letter in text], PAGE).astype(np.int64)


@pytest.fixture
def tree() -> Iterator[RadixTree]:
    tree = RadixTree(PAGE, windows=WINDOWS)
    yield tree
    assert tree.check() == []


class Pages:
    """Numbers pages: those of text, and rows of others beside them."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._number = 0

    def text(self, count: int) -> I32:
        self._number += count
        return np.arange(self._number - count + 1, self._number + 1, dtype=np.int32)

    def rows(self, count: int) -> I32:
        return self.text(count * self._num_groups).reshape(count, self._num_groups)


@pytest.fixture
def new() -> Pages:
    return Pages(WINDOWS.num_groups)


def insert(tree: RadixTree, new: Pages, text: str, num_rows: int) -> tuple[Node, I32]:
    """Cache a text, with pages beside its last ones; return its node, and the rows that are there."""
    node = tree.insert(tokens(text), new.text(len(text))).node
    return node, tree.windows.keep(node, len(text) - num_rows, new.rows(num_rows))


def found(tree: RadixTree, text: str) -> str:
    """Return where a prompt begins; looking changes nothing, and says the same."""
    seen = tree.peek_windows(tokens(text))
    match = tree.match_windows(tokens(text))
    assert seen == match.num_tokens == tree.peek_windows(tokens(text))
    return text[: seen // PAGE]


def seen(tree: RadixTree, text: str) -> list[list[int]]:
    return list(tree.windows.live(tree.match_windows(tokens(text)).node).tolist())


def test_nothing_is_live_behind_nothing(tree: RadixTree) -> None:
    assert found(tree, "abc") == ""
    assert seen(tree, "abc") == []


def test_a_prompt_begins_where_all_is_here_that_is_live(tree: RadixTree, new: Pages) -> None:
    _, rows = insert(tree, new, "abcdef", 2)
    assert found(tree, "abcdefg") == "abcdef"
    assert seen(tree, "abcdefg") == rows.tolist()


def test_a_prompt_does_not_begin_where_a_page_of_a_window_is_missing(tree: RadixTree, new: Pages) -> None:
    insert(tree, new, "abcdef", 1)
    assert found(tree, "abcdefg") == ""
    insert(tree, new, "uv", 2)
    insert(tree, new, "uvwxyz", 1)
    assert found(tree, "uvwxyz") == "uv"


def test_what_is_live_may_lie_beside_several_nodes(tree: RadixTree, new: Pages) -> None:
    _, first = insert(tree, new, "abc", 2)
    _, second = insert(tree, new, "abcd", 1)
    assert found(tree, "abcd") == "abcd"
    assert seen(tree, "abcd") == [first.tolist()[1], second.tolist()[0]]


def test_a_prompt_that_leaves_a_text_begins_there_if_its_window_is_left(tree: RadixTree, new: Pages) -> None:
    _, rows = insert(tree, new, "abcdef", 4)
    assert seen(tree, "abcdx") == rows.tolist()[:2]
    assert found(tree, "abcx") == ""
    assert found(tree, "abcdex") == "abcde"


def test_a_short_text_has_all_its_pages_live(tree: RadixTree, new: Pages) -> None:
    insert(tree, new, "a", 1)
    assert found(tree, "ab") == "a"


def test_what_is_here_already_stays_and_is_returned(tree: RadixTree, new: Pages) -> None:
    _, rows = insert(tree, new, "abcd", 2)
    node, again = insert(tree, new, "abcd", 3)
    assert again.tolist()[1:] == rows.tolist()
    assert node.num_window_pages == 3
    _, fewer = insert(tree, new, "abcd", 1)
    assert fewer.tolist() == rows.tolist()[1:]


def test_rows_go_beside_each_node_of_a_path(tree: RadixTree, new: Pages) -> None:
    insert(tree, new, "ab", 0)
    insert(tree, new, "abcd", 0)
    node, rows = insert(tree, new, "abcdef", 5)
    assert [step.num_window_pages for step in node.path()] == [2, 2, 1]
    assert seen(tree, "abcd") == rows.tolist()[1:3]


@pytest.mark.parametrize("num_rows", range(7))
@pytest.mark.parametrize("at", range(1, 6))
def test_a_split_leaves_each_page_beside_its_text(tree: RadixTree, new: Pages, at: int, num_rows: int) -> None:
    node, rows = insert(tree, new, "abcdef", num_rows)
    insert(tree, new, "abcdef"[:at] + "x", 0)
    path = [*node.path()]
    beside = [[] if step.windows is None else step.windows.tolist() for step in reversed(path)]
    assert beside == [rows.tolist()[: max(0, num_rows - 6 + at)], rows.tolist()[max(0, num_rows - 6 + at) :]]


# locks


def test_what_is_locked_stays_and_what_is_before_it_goes(tree: RadixTree, new: Pages) -> None:
    node, rows = insert(tree, new, "abcdef", 6)
    tree.lock(node)
    since = tree.lock_windows(node, 4)
    assert tree.num_evictable == 4 * 2
    assert sorted(tree.evict(100).pages) == sorted(rows[:4].ravel())
    assert seen(tree, "abcdef") == rows.tolist()[4:]
    tree.windows.unlock(node, since, node.end)
    tree.unlock(node)
    assert len(tree.evict(100).pages) == 6 + 2 * 2


def test_a_window_that_moves_on_unlocks_the_nodes_that_it_has_passed(tree: RadixTree, new: Pages) -> None:
    for end in range(1, 7):
        node, _ = insert(tree, new, "abcdef"[:end], 1)
    tree.lock(node)
    since = tree.lock_windows(node, 1)
    left = [tree.windows.unlock(node, since, 1)]
    for first in range(2, 7):
        left.append(tree.windows.unlock(node, left[-1], first))
        assert [step.num_window_locks for step in node.path()] == [1] * (6 - first) + [0] * first
    assert left == [1, 2, 3, 4, 5, 6]
    tree.unlock(node)


def test_a_window_lock_survives_the_split_of_its_node(tree: RadixTree, new: Pages) -> None:
    node, rows = insert(tree, new, "abcdef", 2)
    tree.lock(node)
    since = tree.lock_windows(node, 4)
    insert(tree, new, "abcdex", 0)
    assert sorted(tree.evict(100).pages.tolist()) != []
    assert seen(tree, "abcdef") == rows.tolist()
    tree.windows.unlock(node, since, node.end)
    assert all(step.num_window_locks == 0 for step in node.path())
    tree.unlock(node)


def test_two_that_see_a_window_must_both_let_it_go(tree: RadixTree, new: Pages) -> None:
    node, rows = insert(tree, new, "abcd", 2)
    for _ in range(2):
        tree.lock(node)
        since = tree.lock_windows(node, 2)
    tree.windows.unlock(node, since, node.end)
    assert len(tree.evict(100).pages) == 0
    tree.windows.unlock(node, since, node.end)
    assert sorted(tree.evict(100).pages) == sorted(rows.ravel())
    for _ in range(2):
        tree.unlock(node)


# eviction


def test_what_is_live_behind_no_end_goes_first_oldest_page_first(tree: RadixTree, new: Pages) -> None:
    _, rows = insert(tree, new, "abcdef", 6)
    assert [tree.evict(1).pages.tolist() for _ in range(4)] == rows.tolist()[:4]
    assert found(tree, "abcdef") == "abcdef"


def test_an_end_of_a_text_that_goes_on_is_spare(tree: RadixTree, new: Pages) -> None:
    _, first = insert(tree, new, "abcd", 2)
    insert(tree, new, "abcdefg", 3)
    assert sorted(tree.evict(6).pages)[:4] == sorted(first.ravel())
    assert found(tree, "abcdefg") == "abcdefg"


def test_where_texts_part_the_window_stays(tree: RadixTree, new: Pages) -> None:
    _, trunk = insert(tree, new, "abcd", 2)
    insert(tree, new, "abcdefg", 3)
    insert(tree, new, "abcdxyz", 3)
    assert len(tree.evict(4).pages) == 4
    assert seen(tree, "abcd") == trunk.tolist()
    assert {found(tree, text) for text in ("abcdefg", "abcdxyz")} == {"abcdefg", "abcdxyz"}


def test_where_texts_parted_and_one_is_gone_the_window_is_spare_again(tree: RadixTree, new: Pages) -> None:
    _, trunk = insert(tree, new, "abcd", 2)
    insert(tree, new, "abcdxyz", 0)
    node, rows = insert(tree, new, "abcdefg", 2)
    tree.lock(node)
    since = tree.lock_windows(node, 5)
    assert len(tree.evict(3).pages) == 3  # the other text
    assert sorted(tree.evict(4).pages) == sorted(trunk.ravel())
    assert seen(tree, "abcdefg") == rows.tolist()
    tree.windows.unlock(node, since, node.end)
    tree.unlock(node)


def test_what_has_become_spare_while_it_was_locked_goes_first_when_it_is_let_go(tree: RadixTree, new: Pages) -> None:
    insert(tree, new, "uv", 0)
    node, rows = insert(tree, new, "abcd", 2)
    tree.lock(node)
    since = tree.lock_windows(node, 2)
    _, longer = insert(tree, new, "abcdefg", 3)
    assert sorted(tree.evict(3).pages)[1:] == longer.tolist()[0]  # and the end of another text
    tree.windows.unlock(node, since, node.end)
    tree.unlock(node)
    assert sorted(tree.evict(4).pages) == sorted(rows.ravel())


def test_the_window_goes_with_its_text(tree: RadixTree, new: Pages) -> None:
    insert(tree, new, "abcd", 2)
    assert len(tree.evict(100).pages) == 4 + 4
    assert (tree.num_pages, tree.windows.num_pages, len(tree.windows.nodes)) == (0, 0, 0)


def test_a_window_of_locked_text_goes_when_nothing_else_is_left(tree: RadixTree, new: Pages) -> None:
    node, rows = insert(tree, new, "abcd", 2)
    tree.lock(node)
    assert sorted(tree.evict(100).pages) == sorted(rows.ravel())
    assert found(tree, "abcd") == ""
    tree.unlock(node)


def test_clearing_and_withdrawing_take_windows_along(tree: RadixTree, new: Pages) -> None:
    node, _ = insert(tree, new, "abcd", 2)
    tree.withdraw(node, 2)
    assert found(tree, "abcd") == ""
    assert len(tree.sweep()) == 4 + 4
    insert(tree, new, "abcd", 2)
    assert len(tree.clear()) == 4 + 4


@pytest.mark.parametrize("length", [300])
def test_long_chains_of_nodes_are_matched_and_evicted(tree: RadixTree, new: Pages, length: int) -> None:
    text = "".join(chr(1000 + number) for number in range(length))
    node = tree.match_windows(tokens("")).node
    for end in range(1, length + 1):
        node = tree.extend(node, tokens(text[:end]), new.text(1)).node
        tree.windows.keep(node, end - 1, new.rows(1))
    assert found(tree, text) == text
    assert len(tree.evict(2 * (length - 2)).pages) == 2 * (length - 2)
    assert found(tree, text) == text
    assert tree.windows.num_pages == 2 * 2


# games


def rows_of(node: Node) -> list[int]:
    return [] if node.windows is None else list(node.windows.ravel().tolist())


class Game:
    """A tree, and a flat list of what is cached: for each page of a text by all tokens up to its end."""

    def __init__(self, windows: WindowPages, seed: int) -> None:
        self.tree = RadixTree(PAGE, windows=windows)
        self._windows = windows
        self._rng = random.Random(seed)
        self._new = Pages(windows.num_groups)
        self._text: dict[Prefix, int] = {}
        self._rows: dict[Prefix, list[int]] = {}
        self._locks: list[tuple[Node, int, list[Prefix], int]] = []  # node, since, its text, its first page locked

    def play(self) -> None:
        moves = [self._insert, self._match, self._match, self._lock, self._pass, self._unlock, self._evict]
        self._rng.choice(moves)()
        assert self.tree.check() == []
        assert sorted(self.tree.pages()) == sorted([*self._text.values(), *chain(*self._rows.values())])

    def _random_text(self) -> I64:
        return np.array([self._rng.randrange(2) for _ in range(self._rng.randrange(20))], dtype=np.int64)

    def _insert(self) -> None:
        """As a request does that has computed all behind a match, and has more pages than are live."""
        text = self._random_text()
        prefixes = self._prefixes(text)
        insertion = self.tree.insert(text, self._new.text(len(prefixes)))
        self._text |= {
            prefix: page
            for prefix, page in zip(prefixes, insertion.pages.tolist(), strict=True)
            if prefix not in self._text
        }
        first = self._rng.randrange(len(prefixes) + 1)
        kept = self.tree.windows.keep(insertion.node, first, self._new.rows(len(prefixes) - first)).tolist()
        for prefix, row in zip(prefixes[first:], kept, strict=True):
            assert self._rows.setdefault(prefix, row) == row

    def _match(self) -> Node:
        text = self._random_text()
        cached = [prefix for prefix in self._prefixes(text) if prefix in self._text]
        seen = self.tree.peek_windows(text)
        match = self.tree.match_windows(text)
        assert match.num_tokens == seen == PAGE * match.node.end
        assert match.pages.tolist() == [self._text[prefix] for prefix in cached[: match.node.end]]
        whole = [end for end in range(len(cached) + 1) if self._is_whole(cached[:end])]
        assert match.node.end in whole
        assert match.node.end == whole[-1] or self._windows.is_chunked
        live = self._live(cached[: match.node.end])
        assert self.tree.windows.live(match.node).tolist() == [self._rows[prefix] for prefix in live]
        return match.node

    def _lock(self) -> None:
        node = self._match()
        if node.parent is None:
            return
        first = self.tree.windows.first_live(node.end)
        self.tree.lock(node)
        since = self.tree.lock_windows(node, first)
        text = np.concatenate([step.tokens for step in reversed([*node.path()])])
        self._locks.append((node, since, self._prefixes(text), first))

    def _pass(self) -> None:
        if self._locks:
            at = self._rng.randrange(len(self._locks))
            node, since, text, first = self._locks[at]
            first = self._rng.randrange(first, len(text) + 1)
            self._locks[at] = node, self.tree.windows.unlock(node, since, first), text, first

    def _unlock(self) -> None:
        if self._locks:
            node, since, _, _ = self._locks.pop(self._rng.randrange(len(self._locks)))
            self.tree.windows.unlock(node, since, node.end)
            self.tree.unlock(node)

    def _evict(self) -> None:
        number, available = self._rng.randrange(12), self.tree.num_evictable
        locked = {page for node in self.tree.windows.nodes if node.num_window_locks for page in rows_of(node)}
        spare = {page for prefix in self._spare() for page in self._rows[prefix]} - locked
        gone = set(self.tree.evict(number).pages.tolist())
        assert len(gone) >= min(number, available)
        assert gone <= spare or number > len(spare)
        seen = [prefix for _, _, text, first in self._locks for prefix in text[first:]]
        assert gone.isdisjoint(chain(*(self._rows.get(prefix, []) for prefix in seen)))
        assert gone.isdisjoint(self._text[prefix] for _, _, text, _ in self._locks for prefix in text)
        self._text = {prefix: page for prefix, page in self._text.items() if page not in gone}
        self._rows = {prefix: row for prefix, row in self._rows.items() if gone.isdisjoint(row)}

    def _spare(self) -> list[Prefix]:
        """Return where rows are that are live behind no end: of a text, or where texts part."""
        num_next = {prefix: 0 for prefix in self._text}
        for prefix in self._text:
            if len(prefix) > PAGE:
                num_next[prefix[:-PAGE]] += 1
        ends = [prefix for prefix, number in num_next.items() if number != 1]
        live = {each for end in ends for each in self._live(self._prefixes(np.array(end)))}
        return [prefix for prefix in self._rows if prefix not in live]

    def _prefixes(self, text: I64) -> list[Prefix]:
        return [tuple(text[:end].tolist()) for end in range(PAGE, len(text) + 1, PAGE)]

    def _live(self, prefixes: list[Prefix]) -> list[Prefix]:
        """Return those of whose pages something is seen behind the last."""
        return prefixes[self._windows.live_from(len(prefixes) * PAGE) // PAGE :]

    def _is_whole(self, prefixes: list[Prefix]) -> bool:
        return all(prefix in self._rows for prefix in self._live(prefixes))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "windows", [WINDOWS, WindowPages(1, 1), WindowPages(3, 7), WindowPages(2, 6, is_chunked=True)], ids=str
)
def test_every_answer_is_that_of_a_flat_list_of_what_is_cached(windows: WindowPages, seed: int) -> None:
    game = Game(windows, seed)
    for _ in range(250):
        game.play()


def test_a_text_whose_windows_are_gone_is_begun_with_behind_its_last_whole_chunk() -> None:
    tree = RadixTree(PAGE, windows=WindowPages(2, 8, is_chunked=True))
    tokens = np.arange(30)
    tree.insert(tokens[:28], np.arange(1, 15, dtype=np.int32))
    assert tree.peek_windows(tokens) == 24  # behind three chunks, of 8 tokens
    match = tree.match_windows(tokens)
    assert (match.num_tokens, match.pages.tolist()) == (24, list(range(1, 13)))
    assert tree.peek_windows(tokens[:20]) == 16
    assert tree.check() == []
