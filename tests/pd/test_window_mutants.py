"""Bugs planted in what becomes of pages of layers with a window: each changes tokens, or is refused.

A model whose windows miss a page, or hold one of somebody else, is as fluent as ever. So each mistake that we could
think of is made here: in what is sent, in what a step is told, in the cache, and where a request computes again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np
import pytest
from null_runner import NullRunner
from windowed_runner import WindowedRunner, expected_output

from diptych.common.errors import InvalidTransition
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.request_windows import RequestWindows
from diptych.engine.cache.tree.cached_windows import CachedWindows
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.batch import ForwardBatch, ForwardMode, WindowGroups
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.ownership import PageState
from diptych.kvtransfer.transport import PageWrite
from diptych.prefill.sending import Sender

VOCAB, PAGE = 1000, 4
SLIDING = WindowPages(2, 10)
HEAD = [(5 * i) % VOCAB for i in range(26)]
PROMPTS: Final = [
    HEAD[:22],
    [*HEAD[:22], 61, 62, 63],
    [*HEAD[:17], 71, 72],
    [*HEAD[:17], 81, 82],
    [*HEAD[:17], 81, 83, 84, 85, 86],
    [*HEAD[:8], 91],
    HEAD,
]
NUM_REQUESTS = 50
SETTINGS: Final = [(12, 7, 1), (12, 11, 2), (12, 16, 5)]  # pages of tokens at prefill, tokens of a step, seed
Patch = pytest.MonkeyPatch
Pair = Any  # the fixture's class: test helpers can't be imported
Mutant = Callable[[Patch, type[Pair]], None]


def windowed_model(num_pages: int, windows: WindowPages) -> tuple[Any, WindowedRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)


@cache
def right(prompt: tuple[int, ...], num_tokens: int, windows: WindowPages) -> list[int]:
    return expected_output(list(prompt), num_tokens, VOCAB, windows)


class Play:
    """Prompts that begin alike on a pair whose pools are too small for them. No digest keeps a wrong byte from it."""

    def __init__(
        self,
        make_pair: type[Pair],
        windows: WindowPages,
        integrity: str,
        num_pages: int,
        max_step_tokens: int,
        seed: int,
    ) -> None:
        rules = dataclasses.replace(make_pair.__init__.__kwdefaults__["rules"], integrity=integrity)
        self._windows = windows
        self._asked: dict[int, tuple[list[int], int]] = {}
        self._rng = random.Random(seed)
        self.pair = make_pair(
            model=partial(windowed_model, windows=windows),
            windows=windows,
            prefill_pages=num_pages * (1 + windows.num_groups),
            decode_pages=20 * (1 + windows.num_groups),
            max_step_tokens=max_step_tokens,
            rules=rules,
            check_every=15,
        )
        self.pair.check = self._check

    def is_right(self) -> bool:
        """Play one after the other, then together, then at random moments; look at the answers each time."""
        rounds = (self._one_after_the_other, self._together, self._at_random)
        return all(self._end(play) for play in rounds)

    def _check(self) -> None:
        """Compare the books; and what a request is told of, and reads, must be its own or the tree's."""
        type(self.pair).check(self.pair)
        for side in (self.pair.prefill, self.pair.decode):
            holders = side.core.report().holders
            for request in (*holders.owning, *holders.importing):
                table, first = side.cache.window_table[request.row, : request.windows_end], request.first_window
                held = [*side.cache.pages_of(request), *table[first:].ravel()]
                assert np.isin(table, held).all()
                states = side.cache.pool.states(table[first : request.first_own_window].ravel())
                assert (states == PageState.CACHED).all()

    def _end(self, play: Callable[[], None]) -> bool:
        play()
        self.pair.run()
        answers = [(self.pair.tokens(room), *asked) for room, asked in self._asked.items()]
        return all(tokens == right(tuple(prompt), number, self._windows) for tokens, prompt, number in answers)

    def _one_after_the_other(self) -> None:
        for prompt in PROMPTS:
            self._start(prompt, 9)
            self.pair.run()

    def _together(self) -> None:
        for prompt in PROMPTS:
            self._start(prompt, 45)

    def _at_random(self) -> None:
        prompts = [list(prompt) for prompt in PROMPTS]
        for _ in range(NUM_REQUESTS):
            prompt = self._rng.choice(prompts)
            tail = [self._rng.randrange(3) for _ in range(self._rng.randrange(1, 9))]
            cut = self._rng.choice([len(prompt), self._rng.randrange(1 + len(prompt))])
            asked, num_tokens = [*prompt[:cut], *tail], self._rng.choice([1, 4, 7, 30])
            self._start(asked, num_tokens)
            output = right(tuple(asked), num_tokens, self._windows)
            prompts[self._rng.randrange(len(prompts))] = [*asked, *output][:33]  # some go on from answers
            for _ in range(self._rng.randrange(25)):
                move = self._rng.choice([self.pair.deliver, self.pair.step])
                move(self._rng.choice([self.pair.prefill, self.pair.decode]))

    def _start(self, prompt: list[int], num_tokens: int) -> None:
        room = len(self._asked) + 1
        self._asked[room] = prompt, num_tokens
        self.pair.start(room, prompt, max_tokens=num_tokens)


# what is sent


def sent(change: Callable[[PageWrite, int], PageWrite]) -> Mutant:
    """A mutant of the write of what is live behind a prompt."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain = Sender._write_windows

        def write_windows(self: Any, room: Any, now_s: float) -> None:
            post, num_groups = Sender._post, self._cache.windows.num_groups
            self._post = lambda room, write, *rest: post(self, room, change(write, num_groups), *rest)
            plain(self, room, now_s)
            del self._post

        patch.setattr(Sender, "_write_windows", write_windows)

    plant.__name__ = change.__name__
    return plant


def never_sent(patch: Patch, pair_class: type[Pair]) -> None:
    patch.setattr(Sender, "_write_windows", lambda self, room, now_s: None)


@sent
def sent_in_another_order(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=write.src[::-1].copy())


@sent
def sent_to_another_group(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=write.src.reshape(num_groups, -1)[::-1].ravel())


@sent
def sent_page_by_page(write: PageWrite, num_groups: int) -> PageWrite:
    """Where the peer expects it group by group."""
    return dataclasses.replace(write, src=write.src.reshape(num_groups, -1).ravel("F"))


@sent
def sent_without_the_newest_page(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=write.src[:-1], dst=write.dst[:-1])


@sent
def sent_without_the_oldest_page(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=write.src[1:], dst=write.dst[1:])


@sent
def sent_shifted_by_a_page(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=np.roll(write.src.reshape(num_groups, -1), 1, axis=1).ravel())


@sent
def sent_one_page_for_all(write: PageWrite, num_groups: int) -> PageWrite:
    return dataclasses.replace(write, src=np.repeat(write.src[:1], len(write.src)))


def sent_from_the_row_of_another(patch: Patch, pair_class: type[Pair]) -> None:
    plain = Sender._write_windows

    def write_windows(self: Any, room: Any, now_s: float) -> None:
        windows = self._cache._windows
        table, windows.table = windows.table, np.roll(windows.table, 1, axis=0)
        try:
            plain(self, room, now_s)
        finally:
            windows.table = table

    patch.setattr(Sender, "_write_windows", write_windows)


def landed(change: Callable[[Any, Any], Any]) -> Mutant:
    """A mutant of what pages of windows hold when they have landed, by what was there and what was sent."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain_copy, plain_write = pair_class._copy, Sender._write_windows
        of_windows: list[PageWrite] = []

        def write_windows(self: Any, room: Any, now_s: float) -> None:
            num_effects = len(self._effects)
            plain_write(self, room, now_s)
            of_windows.extend(effect.write for effect in self._effects[num_effects:])

        def copy(self: Any, side: Any, other: Any, write: PageWrite) -> None:
            before = other.kv[write.dst]
            plain_copy(self, side, other, write)
            if any(write is each for each in of_windows):
                other.kv[write.dst] = change(before, other.kv[write.dst])

        patch.setattr(Sender, "_write_windows", write_windows)
        patch.setattr(pair_class, "_copy", copy)

    plant.__name__ = change.__name__
    return plant


@landed
def landed_as_zeros(before: Any, pages: Any) -> Any:
    return np.zeros_like(pages)


@landed
def landed_without_an_effect(before: Any, pages: Any) -> Any:
    """What others left there is stale."""
    return before


@landed
def landed_shifted_by_a_token(before: Any, pages: Any) -> Any:
    return np.roll(pages.ravel(), 1).reshape(pages.shape)


def granted_in_another_order(patch: Patch, pair_class: type[Pair]) -> None:
    """Decode names its pages page by page, and prefill fills them group by group."""

    def owned_pages(self: Any, request: Any) -> Any:
        return np.concatenate([self.pages_of(request)[request.node.end :], self._windows.own(request).ravel()])

    patch.setattr(KvCache, "owned_pages", owned_pages)


def granted_one_page_short(patch: Patch, pair_class: type[Pair]) -> None:
    plain = RequestWindows.begin_import

    def begin_import(self: Any, request: Any, node: Node, num_pages: int) -> int:
        needed, num_groups = plain(self, request, node, num_pages), int(self._windows.num_groups)
        if needed <= num_groups:
            return needed
        request.first_window += 1
        request.first_own_window += 1
        return needed - num_groups

    patch.setattr(RequestWindows, "begin_import", begin_import)


# what a step is told


def told(change: Callable[[WindowGroups, ForwardBatch], WindowGroups]) -> Mutant:
    """A mutant of what a step is told."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain = WindowedRunner.logits

        def logits(self: Any, batch: Any) -> list[int]:
            return plain(self, dataclasses.replace(batch, window_groups=change(batch.window_groups, batch)))

        patch.setattr(WindowedRunner, "logits", logits)

    plant.__name__ = change.__name__
    return plant


@told
def told_the_pages_of_another_request(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    """Only while several run."""
    return dataclasses.replace(groups, page_tables=np.roll(groups.page_tables, 1, axis=1))


@told
def told_of_pages_shifted_by_one(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    return dataclasses.replace(groups, page_tables=np.roll(groups.page_tables, 1, axis=2))


@told
def told_of_another_group(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    """When it decodes."""
    if batch.mode is not ForwardMode.DECODE:
        return groups
    return WindowGroups(groups.page_tables[::-1].copy(), groups.out_slots[::-1].copy())


@told
def told_without_the_newest_page(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    tables = groups.page_tables.copy()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        newest = (seq_len - 1) // PAGE
        tables[:, row, newest] = tables[:, row, max(0, newest - 1)]
    return dataclasses.replace(groups, page_tables=tables)


@told
def told_of_a_window_one_page_short(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    tables = groups.page_tables.copy()
    for row, start in enumerate((batch.seq_lens - batch.extend_lens).tolist()):
        oldest = SLIDING.live_from(start) // PAGE
        tables[:, row, oldest] = tables[:, row, start // PAGE]
    return dataclasses.replace(groups, page_tables=tables)


@told
def told_to_write_nothing(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    return dataclasses.replace(groups, out_slots=groups.out_slots % PAGE)


@told
def told_to_write_a_token_late(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    slots = groups.out_slots
    return dataclasses.replace(groups, out_slots=slots // PAGE * PAGE + (slots + 1) % PAGE)


@told
def told_to_write_into_one_group(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    return dataclasses.replace(groups, out_slots=np.broadcast_to(groups.out_slots[0], groups.out_slots.shape))


@told
def told_to_write_into_pages_of_all_tokens(groups: WindowGroups, batch: ForwardBatch) -> WindowGroups:
    return dataclasses.replace(groups, out_slots=np.broadcast_to(batch.out_slots, groups.out_slots.shape))


# the cache


def matched_by_text_alone(patch: Patch, pair_class: type[Pair]) -> None:
    """Where text is cached, a request begins, with pages of its own where the window should be."""
    patch.setattr(KvCache, "begins_with_windows", lambda self, request: False)


def matched_with_what_is_left_of_a_window(patch: Patch, pair_class: type[Pair]) -> None:
    """It does not ask whether windows are whole."""
    patch.setattr(CachedWindows, "are_whole", lambda self, path, end: True)
    patch.setattr(CachedWindows, "live", filled(CachedWindows.live))


def matched_with_a_window_one_page_short(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows.are_whole

    def are_whole(self: Any, path: Any, end: int) -> bool:
        of_all = self.first_live
        self.first_live = lambda end: min(end, of_all(end) + 1)
        is_whole: bool = plain(self, path, end)
        del self.first_live
        return is_whole

    patch.setattr(CachedWindows, "are_whole", are_whole)
    patch.setattr(CachedWindows, "live", filled(CachedWindows.live))


def filled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Let the null page stand for what is missing."""

    def live(self: Any, node: Node) -> Any:
        rows = plain(self, node)
        return np.pad(rows, ((node.end - self.first_live(node.end) - len(rows), 0), (0, 0)))

    return live


def matched_shifted_by_a_page(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows.live
    patch.setattr(CachedWindows, "live", lambda self, node: np.roll(plain(self, node), 1, axis=0))


def never_locked(patch: Patch, pair_class: type[Pair]) -> None:
    """Pages are evicted while requests see them."""
    patch.setattr(CachedWindows, "lock", lambda self, node, first: node.end)


def locked_one_page_short(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows.lock
    patch.setattr(CachedWindows, "lock", lambda self, node, first: plain(self, node, first + 1))


def unlocked_one_page_early(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows.unlock
    patch.setattr(CachedWindows, "unlock", lambda self, node, since, first: plain(self, node, since, first + 1))


def never_unlocked(patch: Patch, pair_class: type[Pair]) -> None:
    patch.setattr(CachedWindows, "unlock", lambda self, node, since, first: since)


def evicted_though_it_is_locked(patch: Patch, pair_class: type[Pair]) -> None:
    patch.setattr(CachedWindows, "first", lambda self: next(iter(self._nodes), None))


def spare_though_it_is_locked(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows._num_spare

    def num_spare(self: Any, node: Node) -> int:
        locks, node.num_window_locks = node.num_window_locks, 0
        number = plain(self, node)
        node.num_window_locks = locks
        return number

    patch.setattr(CachedWindows, "_num_spare", num_spare)


def cut_from_the_wrong_end(patch: Patch, pair_class: type[Pair]) -> None:
    """The newest pages go where the oldest ones should."""
    plain = CachedWindows._cut

    def cut(self: Any, node: Node, num_rows: int) -> Any:
        if node.windows is not None:
            node.windows = np.roll(node.windows, num_rows, axis=0)
        return plain(self, node, num_rows)

    patch.setattr(CachedWindows, "_cut", cut)


def passed_a_page_too_early(patch: Patch, pair_class: type[Pair]) -> None:
    """Where one page fewer is live; as a page of tokens may be on its way, that is two pages of tokens early."""
    plain = RequestWindows.pass_by
    patch.setattr(RequestWindows, "pass_by", lambda self, request, number: plain(self, request, number + 2 * PAGE))


def counted_a_token_short(patch: Patch, pair_class: type[Pair]) -> None:
    """By both sides, so that they agree."""
    plain = WindowPages.first_live
    shorter_window = WindowPages(SLIDING.num_groups, SLIDING.window - 1)
    patch.setattr(WindowPages, "first_live", lambda self, *args: plain(shorter_window, *args))


def grown_by_fewer_pages_than_a_step_needs(patch: Patch, pair_class: type[Pair]) -> None:
    plain = KvCache.grow_windows
    patch.setattr(KvCache, "grow_windows", lambda self, request, number: plain(self, request, number - PAGE))


def grown_in_another_order(patch: Patch, pair_class: type[Pair]) -> None:
    """A page is put where the one behind it was."""
    plain = RequestWindows.append

    def append(self: Any, request: Any, pages: Any) -> None:
        plain(self, request, pages)
        held = self.table[request.row, : request.windows_end]
        held[:] = np.roll(held, 1, axis=0)

    patch.setattr(RequestWindows, "append", append)


def passed_pages_are_still_named(patch: Patch, pair_class: type[Pair]) -> None:
    patch.setattr(RequestWindows, "_fill_passed", lambda self, request: None)


def kept(change: Callable[[Any], Any]) -> Mutant:
    """A mutant of which pages are put beside which text."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain = CachedWindows._prepend
        patch.setattr(CachedWindows, "_prepend", lambda self, node, rows: plain(self, node, change(rows)))

    plant.__name__ = change.__name__
    return plant


@kept
def kept_shifted_by_a_page(rows: Any) -> Any:
    return np.roll(rows, 1, axis=0)


@kept
def kept_in_another_group(rows: Any) -> Any:
    return rows[:, ::-1].copy()


def kept_above_its_node(patch: Patch, pair_class: type[Pair]) -> None:
    """Pages stand beside the text before theirs."""
    plain = CachedWindows._prepend

    def prepend(self: Any, node: Node, rows: Any) -> None:
        upper = node.parent
        is_free = upper is not None and upper.parent is not None and upper.windows is None
        plain(self, upper if is_free and upper is not None and len(rows) <= len(upper.pages) else node, rows)

    patch.setattr(CachedWindows, "_prepend", prepend)


def read_on_from_what_was_given_back(patch: Patch, pair_class: type[Pair]) -> None:
    """A request that finds its pages in the tree goes on with its own."""
    plain = RequestWindows.hand_over

    def hand_over(self: Any, request: Any, node: Node) -> Any:
        rows = self.table[request.row].copy()
        duplicate = plain(self, request, node)
        self.table[request.row] = rows
        return duplicate

    patch.setattr(RequestWindows, "hand_over", hand_over)


def given_back_though_kept(patch: Patch, pair_class: type[Pair]) -> None:
    plain = CachedWindows.keep

    def keep(self: Any, node: Node, first: int, rows: Any) -> Any:
        plain(self, node, first, rows)
        return rows

    patch.setattr(CachedWindows, "keep", keep)


def split_into_the_wrong_halves(patch: Patch, pair_class: type[Pair]) -> None:
    plain = Node.split

    def split(self: Any, num_pages: int, page_size: int) -> Node:
        upper = plain(self, num_pages, page_size)
        if upper.windows is not None:
            rows = np.concatenate([self.windows, upper.windows])
            upper.windows, self.windows = rows[: len(upper.windows)], rows[len(upper.windows) :]
        return upper

    patch.setattr(Node, "split", split)


def split_without_a_lock(patch: Patch, pair_class: type[Pair]) -> None:
    plain = Node.split

    def split(self: Any, num_pages: int, page_size: int) -> Node:
        upper = plain(self, num_pages, page_size)
        upper.num_window_locks = 0
        return upper

    patch.setattr(Node, "split", split)


def split_without_the_upper_half(patch: Patch, pair_class: type[Pair]) -> None:
    plain = Node.split

    def split(self: Any, num_pages: int, page_size: int) -> Node:
        upper = plain(self, num_pages, page_size)
        upper.windows = None
        return upper

    patch.setattr(Node, "split", split)


# what is in pages that are found again


def found(change: Callable[[Any], Any], *, is_retracted: bool) -> Mutant:
    """A mutant of what pages of the tree hold, `[num_pages, ..., PAGE]`, when a request is to begin with them."""

    def plant(patch: Patch, pair_class: type[Pair]) -> None:
        plain_fill, plain_logits = RequestWindows.fill, WindowedRunner.logits
        begun: list[tuple[int, Any]] = []  # pages of the pool that they are of, which tells the sides apart

        def fill(self: Any, request: Any, pages: Any) -> None:
            plain_fill(self, request, pages)
            rows = self.table[request.row, request.first_window : request.first_own_window]
            if rows.size and bool(request.num_output_tokens) is is_retracted:
                begun.extend((1 + self._pool.capacity, pages.copy()) for pages in rows.T)

        def logits(self: Any, batch: Any) -> list[int]:
            for pages in [pages for num_pages, pages in begun if num_pages == len(self._kv)]:
                self._kv[pages] = change(self._kv[pages])
            begun[:] = [each for each in begun if each[0] != len(self._kv)]
            return plain_logits(self, batch)

        patch.setattr(RequestWindows, "fill", fill)
        patch.setattr(WindowedRunner, "logits", logits)

    plant.__name__ = f"found_{change.__name__}" + "_after_a_retraction" * is_retracted
    return plant


def as_zeros(pages: Any) -> Any:
    return np.zeros_like(pages)


def without_the_oldest(pages: Any) -> Any:
    return np.concatenate([np.zeros_like(pages[:1]), pages[1:]])


def shifted_by_a_token(pages: Any) -> Any:
    return np.roll(pages.ravel(), 1).reshape(pages.shape)


def in_another_order(pages: Any) -> Any:
    return pages[::-1]


def of_other_tokens(pages: Any) -> Any:
    """As a page is that has been given to somebody else meanwhile."""
    return pages + np.uint64(1)


# where a request computes again


def computed_again_with_text_alone(patch: Patch, pair_class: type[Pair]) -> None:
    """One that was retracted begins where its text ends, as if a peer had sent what is live there."""
    plain = KvCache.begins_with_windows
    patch.setattr(
        KvCache,
        "begins_with_windows",
        lambda self, request: plain(self, request) and (request.num_output_tokens == 0 or not request.is_imported),
    )


def retired_by_the_order_of_its_window(patch: Patch, pair_class: type[Pair]) -> None:
    """What is kept of a request is what it holds, from the oldest page on, beside the first of its text."""
    plain = KvCache.retire

    def retire(self: Any, request: Any) -> None:
        own = self.window_table[request.row, request.first_own_window : request.num_pages]
        own[:] = np.roll(own, 1, axis=0)
        plain(self, request)

    patch.setattr(KvCache, "retire", retire)


def retired_a_step_ahead(patch: Patch, pair_class: type[Pair]) -> None:
    """Pages are kept as if the next page of tokens were computed."""
    plain = KvCache.retire

    def retire(self: Any, request: Any) -> None:
        computed = request.computed_len
        request.computed_len = min(computed + PAGE, request.num_tokens)
        plain(self, request)

    patch.setattr(KvCache, "retire", retire)


def retired_with_what_was_passed(patch: Patch, pair_class: type[Pair]) -> None:
    """What is behind the windows is given back once more."""
    plain = KvCache.retire

    def retire(self: Any, request: Any) -> None:
        request.first_own_window = min(request.first_own_window, max(0, request.first_window - 1))
        plain(self, request)

    patch.setattr(KvCache, "retire", retire)


MUTANTS: Final = [
    never_sent,
    sent_in_another_order,
    sent_to_another_group,
    sent_page_by_page,
    sent_without_the_newest_page,
    sent_without_the_oldest_page,
    sent_shifted_by_a_page,
    sent_one_page_for_all,
    sent_from_the_row_of_another,
    landed_as_zeros,
    landed_without_an_effect,
    landed_shifted_by_a_token,
    granted_in_another_order,
    granted_one_page_short,
    told_the_pages_of_another_request,
    told_of_pages_shifted_by_one,
    told_of_another_group,
    told_without_the_newest_page,
    told_of_a_window_one_page_short,
    told_to_write_nothing,
    told_to_write_a_token_late,
    told_to_write_into_one_group,
    told_to_write_into_pages_of_all_tokens,
    matched_by_text_alone,
    matched_with_what_is_left_of_a_window,
    matched_with_a_window_one_page_short,
    matched_shifted_by_a_page,
    never_locked,
    locked_one_page_short,
    unlocked_one_page_early,
    never_unlocked,
    evicted_though_it_is_locked,
    spare_though_it_is_locked,
    cut_from_the_wrong_end,
    passed_a_page_too_early,
    counted_a_token_short,
    grown_by_fewer_pages_than_a_step_needs,
    grown_in_another_order,
    passed_pages_are_still_named,
    kept_shifted_by_a_page,
    kept_in_another_group,
    kept_above_its_node,
    read_on_from_what_was_given_back,
    given_back_though_kept,
    split_into_the_wrong_halves,
    split_without_a_lock,
    split_without_the_upper_half,
    computed_again_with_text_alone,
    retired_by_the_order_of_its_window,
    retired_a_step_ahead,
    retired_with_what_was_passed,
    *(
        found(change, is_retracted=is_retracted)
        for is_retracted in (False, True)
        for change in (as_zeros, without_the_oldest, shifted_by_a_token, in_another_order, of_other_tokens)
    ),
]
KINDS = pytest.mark.parametrize("windows", [SLIDING, WindowPages(1, 8, is_chunked=True), WindowPages(3, 3)], ids=str)


@KINDS
@pytest.mark.parametrize(("integrity", "setting"), [("off", SETTINGS[0]), ("always", SETTINGS[1])], ids=str)
def test_without_a_mutant_all_is_right(
    make_pair: type[Pair], windows: WindowPages, integrity: str, setting: tuple[int, int, int]
) -> None:
    play = Play(make_pair, windows, integrity, *setting)
    assert play.is_right()
    assert play.pair.decode.core.report().counts.retractions > 0
    play.pair.assert_clean()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_changes_tokens_or_is_refused(make_pair: type[Pair], monkeypatch: Patch, mutant: Mutant) -> None:
    mutant(monkeypatch, make_pair)
    try:
        is_right = all(Play(make_pair, SLIDING, "off", *setting).is_right() for setting in SETTINGS)
    except (InvalidTransition, AssertionError):
        return
    assert not is_right
