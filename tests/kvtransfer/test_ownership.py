from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diptych.common.errors import InvalidTransition
from diptych.kvtransfer.ownership import (
    NEEDS_A_PIN,
    NEEDS_NO_PIN,
    TRANSITIONS,
    Operation,
    PagePool,
    Pages,
    PageState,
)

COUNTED_AS = {
    PageState.FREE: "free",
    PageState.OWNED: "owned",
    PageState.CACHED: "cached",
    PageState.IMPORTING: "importing",
    PageState.QUARANTINE: "quarantined",
}


def page_list(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def granted(pool: PagePool, count: int) -> Pages:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def bring(pool: PagePool, state: PageState) -> Pages:
    """Grant one page and bring it to `state`."""
    page = granted(pool, 1)
    if state is PageState.FREE:
        pool.release(page)
    if state is PageState.CACHED:
        pool.cache(page)
    if state in (PageState.IMPORTING, PageState.QUARANTINE):
        pool.begin_import(page)
    if state is PageState.QUARANTINE:
        pool.quarantine(page)
    return page


def method(pool: PagePool, operation: Operation) -> Callable[[Pages], None]:
    bound: Callable[[Pages], None] = getattr(pool, operation.name.lower())
    return bound


def state_of(pool: PagePool) -> PageState:
    """The state of the only page of a pool of capacity 1."""
    counts = pool.counts()
    return next(state for state, name in COUNTED_AS.items() if counts[name] == 1)


LATER_OPERATIONS = [operation for operation in Operation if operation is not Operation.ALLOCATE]


@pytest.mark.parametrize("operation", LATER_OPERATIONS)
@pytest.mark.parametrize("state", PageState)
def test_every_state_obeys_the_transition_table(state: PageState, operation: Operation) -> None:
    pool = PagePool(2)
    page = bring(pool, state)
    if operation in NEEDS_A_PIN and (state, Operation.PIN) in TRANSITIONS:
        pool.pin(page)
    before = pool.counts()
    if (state, operation) in TRANSITIONS:
        method(pool, operation)(page)
        assert state_of(pool) == TRANSITIONS[state, operation]
    else:
        with pytest.raises(InvalidTransition):
            method(pool, operation)(page)
        assert pool.counts() == before


@pytest.mark.parametrize("state", PageState)
def test_only_free_pages_are_granted(state: PageState) -> None:
    pool = PagePool(2)
    bring(pool, state)
    assert (pool.allocate(1) is not None) == ((state, Operation.ALLOCATE) in TRANSITIONS)


@pytest.mark.parametrize("state", [PageState.OWNED, PageState.CACHED])
@pytest.mark.parametrize("operation", LATER_OPERATIONS)
def test_a_pinned_page_is_neither_freed_nor_written(state: PageState, operation: Operation) -> None:
    pool = PagePool(2)
    page = bring(pool, state)
    pool.pin(page)
    if (state, operation) in TRANSITIONS and operation not in NEEDS_NO_PIN:
        method(pool, operation)(page)
        assert state_of(pool) == TRANSITIONS[state, operation]
    else:
        with pytest.raises(InvalidTransition):
            method(pool, operation)(page)
        assert state_of(pool) == state
        assert pool.pinned(page)


@pytest.mark.parametrize("times", [2, 9])
def test_a_page_that_is_listed_twice_or_more_often_than_there_are_pages_is_refused(times: int) -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(InvalidTransition, match="listed twice"):
        pool.release(np.repeat(pages, times))
    assert pool.counts()["owned"] == 2


def test_pins_are_counted() -> None:
    pool = PagePool(4)
    pages = granted(pool, 3)
    pool.pin(pages)
    pool.pin(pages[:1])
    pool.unpin(pages)
    assert [pool.pinned(pages[i : i + 1]) for i in range(3)] == [True, False, False]
    assert pool.counts()["exporting"] == 1
    pool.unpin(pages[:1])
    assert not pool.pinned(pages)
    with pytest.raises(InvalidTransition, match="UNPIN of pages not pinned: 1; page 1 is OWNED"):
        pool.unpin(pages[:1])


def test_the_null_page_is_never_granted() -> None:
    pool = PagePool(5)
    assert pool.capacity == pool.num_free == 4
    assert sorted(granted(pool, 4).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_usable_page_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match="null page"):
        PagePool(num_pages)


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = PagePool(5)
    pages = granted(pool, 2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.check(owned=[pages]) == []


def test_allocating_nothing_grants_nothing() -> None:
    pool = PagePool(5)
    assert granted(pool, 0).tolist() == []
    assert pool.num_free == 4
    with pytest.raises(InvalidTransition):
        pool.allocate(-1)


@pytest.mark.parametrize("bad", [(0,), (1, 0), (1, 2, 1), (-1,), (5,), (1, 2**31 - 1)])
@pytest.mark.parametrize("operation", LATER_OPERATIONS)
def test_null_foreign_and_repeated_pages_are_refused_whole(operation: Operation, bad: tuple[int, ...]) -> None:
    pool = PagePool(5)
    pages = granted(pool, 4)
    before = pool.counts()
    with pytest.raises(InvalidTransition):
        method(pool, operation)(page_list(*bad))
    assert pool.counts() == before
    assert pool.check(owned=[pages]) == []


def test_one_page_in_a_wrong_state_stops_the_whole_operation() -> None:
    pool = PagePool(5)
    pages = granted(pool, 3)
    pool.cache(pages[1:2])
    with pytest.raises(InvalidTransition, match="page 2 is CACHED"):
        pool.release(pages)
    assert pool.check(owned=[pages[[0, 2]]], cached=[pages[1:2]]) == []


def test_released_pages_are_granted_again_in_their_order() -> None:
    pool = PagePool(9)
    pages = granted(pool, 4)
    assert pages.tolist() == [1, 2, 3, 4]
    pool.release(pages)
    assert granted(pool, 6).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_grant_holds_until_the_page_is_free() -> None:
    pool = PagePool(3)
    pages = granted(pool, 2)
    first = pool.generations(pages)
    assert first.tolist() == [1, 1]
    pool.begin_import(pages)
    assert pool.holds(pages, first)
    pool.quarantine(pages)
    assert pool.holds(pages, first)
    pool.release_quarantine(pages[:1])
    assert not pool.holds(pages, first)
    assert pool.holds(pages[1:], first[1:])
    again = granted(pool, 1)
    assert not pool.holds(again, first[:1])
    assert pool.holds(again, first[:1] + 1)


@pytest.mark.parametrize("pages", [(0,), (-1,), (9,), (), (1, 2)])
def test_a_grant_of_nonsense_does_not_hold(pages: tuple[int, ...]) -> None:
    pool = PagePool(5)
    granted(pool, 4)
    assert not pool.holds(page_list(*pages), np.ones(1, np.uint32))


def test_check_names_leaks_and_wrong_claims() -> None:
    pool = PagePool(9)
    pages = granted(pool, 6)
    pool.cache(pages[4:])
    assert pool.check(owned=[pages[:2], pages[1:3]], cached=[pages[3:5]], importing=[page_list(99)]) == [
        "claims of pages outside the pool: 99",
        "pages claimed twice: 2",
        "pages claimed as CACHED but not so: 4",
        "CACHED pages leaked: nobody claims them: 6",
    ]
    assert pool.check(owned=[pages[:3]], cached=[pages[4:]]) == ["OWNED pages leaked: nobody claims them: 4"]


def test_check_shortens_long_lists() -> None:
    pool = PagePool(12)
    granted(pool, 11)
    assert pool.check() == ["OWNED pages leaked: nobody claims them: 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"]


def test_check_finds_a_corrupted_free_list_and_a_grant_refuses_it() -> None:
    pool = PagePool(4)
    pages = granted(pool, 1)
    pool._free[1] = pages[0]
    assert pool.check(owned=[pages]) == ["the free list is not the set of FREE pages"]
    with pytest.raises(InvalidTransition, match="page 1 is OWNED"):
        pool.allocate(1)


def test_check_finds_pins_that_outlived_their_page() -> None:
    pool = PagePool(4)
    pool._pins[1:3] = [1, -1]
    assert pool.check() == ["FREE pages with an export pin: 1, 2", "negative pin counts: 2"]
    pool._pins[1:3] = 0
    pool._num_pins = 1
    assert pool.check() == ["1 export pins are counted, and pages have 0"]


class PoolAgainstDict(RuleBasedStateMachine):
    """Plays random operations on the pool and on a dict, and compares them after each."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.state = dict.fromkeys(range(1, num_pages), PageState.FREE)
        self.generation = dict.fromkeys(range(1, num_pages), 0)
        self.pins: Counter[int] = Counter()

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        num_free = self.num_in(PageState.FREE)
        grant = self.pool.allocate(count)
        assert (grant is None) == (num_free < count)
        if grant is None:
            return
        assert len(set(grant.tolist())) == len(grant) == count
        for page, generation in zip(grant.tolist(), self.pool.generations(grant).tolist(), strict=True):
            assert self.state[page] == PageState.FREE
            assert generation > self.generation[page]
            self.generation[page] = generation
            self.state[page] = PageState.OWNED

    @rule(operation=st.sampled_from(LATER_OPERATIONS), data=st.data())
    def move(self, operation: Operation, data: st.DataObject) -> None:
        movable = [page for page in self.state if self.legal(operation, [page])]
        named = data.draw(st.lists(st.sampled_from(movable), unique=True) if movable else st.just([]))
        method(self.pool, operation)(page_list(*named))
        for page in named:
            self.state[page] = TRANSITIONS[self.state[page], operation]
            self.pins[page] += {Operation.PIN: 1, Operation.UNPIN: -1}.get(operation, 0)

    @rule(operation=st.sampled_from(LATER_OPERATIONS), data=st.data())
    def attempt(self, operation: Operation, data: st.DataObject) -> None:
        named = data.draw(st.lists(st.sampled_from(list(self.state)), max_size=4))
        if not self.legal(operation, named):
            with pytest.raises(InvalidTransition):
                method(self.pool, operation)(page_list(*named))

    def legal(self, operation: Operation, named: list[int]) -> bool:
        if len(set(named)) < len(named) or any((self.state[page], operation) not in TRANSITIONS for page in named):
            return False
        pinned = [self.pins[page] > 0 for page in named]
        return not (operation in NEEDS_NO_PIN and any(pinned)) and not (operation in NEEDS_A_PIN and not all(pinned))

    def num_in(self, state: PageState) -> int:
        return sum(actual == state for actual in self.state.values())

    def claims(self, state: PageState) -> Iterable[Pages]:
        return [page_list(page) for page, actual in self.state.items() if actual == state]

    @invariant()
    def the_books_agree(self) -> None:
        expected = {name: self.num_in(state) for state, name in COUNTED_AS.items()}
        assert self.pool.counts() == {**expected, "exporting": sum(count > 0 for count in self.pins.values())}
        assert self.pool.num_free == expected["free"]

    @invariant()
    def no_page_is_lost(self) -> None:
        problems = self.pool.check(
            owned=self.claims(PageState.OWNED),
            cached=self.claims(PageState.CACHED),
            importing=self.claims(PageState.IMPORTING),
            quarantined=self.claims(PageState.QUARANTINE),
        )
        assert problems == []

    @invariant()
    def grants_hold_exactly_while_in_force(self) -> None:
        for page, generation in self.generation.items():
            held = self.pool.holds(page_list(page), np.array([generation], np.uint32))
            assert held == (self.state[page] != PageState.FREE)


TestPoolAgainstDict = PoolAgainstDict.TestCase
TestPoolAgainstDict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
