"""Bugs planted where states and windows are evicted, and where they go down to host memory and come back.

Each changes tokens, or is refused by the books. What was learned of conversations decides who goes (decision 148): it
is learned from few prompts here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from late_copier import LateCopier
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, expected_output, new_states
from simulation.play import seeded
from simulation.rules import RuleBroken

from diptych.common.errors import InvalidTransition
from diptych.engine.cache import turns
from diptych.engine.cache.tree import departures
from diptych.engine.cache.tree.cached_states import CachedStates
from diptych.engine.cache.tree.departures import Departures
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import WindowPages

VOCAB, PAGE, PER_STATE = 1000, 4, 2
NUM_PROMPTS = 90
Patch = pytest.MonkeyPatch
Pair = Any  # the fixture's class: test helpers can't be imported
Mutant = Callable[[Patch], None]


def recurrent_model(num_pages: int) -> tuple[Any, RecurrentRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(16, PER_STATE * PAGE), VOCAB)


@pytest.fixture
def learning(monkeypatch: Patch) -> list[bool]:
    """What is learned is so from a few prompts. One entry each time that a text is chosen by it: whether another."""
    chosen: list[bool] = []
    plain = Departures.pop

    def pop(self: Departures, lowest: Node) -> Node:
        node = plain(self, lowest)
        chosen.append(node is not lowest)
        return node

    monkeypatch.setattr(turns, "LEARNED", 4)
    monkeypatch.setattr(Departures, "pop", pop)
    return chosen


def is_right(make_pair: type[Pair]) -> bool:
    """Play conversations of which some go on, a few at a time, in a pool that has room for few of them."""
    pair = make_pair(
        model=recurrent_model,
        pages_per_state=PER_STATE,
        prefill_pages=72,
        decode_pages=72,
        rules=TransferRules(integrity="off"),
        check_every=12,
    )
    rng, asked = random.Random(5), dict[int, list[int]]()
    conversations: list[list[int]] = []
    for room in range(1, NUM_PROMPTS):
        is_next = bool(conversations) and rng.random() < 0.6
        text = conversations.pop(rng.randrange(len(conversations))) if is_next else [rng.randrange(3)] * 9
        asked[room] = [*text, *(rng.randrange(VOCAB) for _ in range(rng.choice([3, 6, 21])))]
        pair.start(room, asked[room], max_tokens=2)
        conversations = [*conversations, *([asked[room]] if len(asked[room]) < 70 else [])][-8:]
        if room % 3 == 0:
            pair.run()
    pair.run()
    return all(
        pair.tokens(room) == expected_output(prompt, 2, VOCAB, PER_STATE * PAGE) for room, prompt in asked.items()
    )


def kept_though_it_went(patch: Patch) -> None:
    """A stale one: the node still names pages that others have by now."""
    plain = CachedStates.pop

    def pop(self: CachedStates, node: Node) -> Any:
        state = node.state
        pages = plain(self, node)
        node.state = state
        return pages

    patch.setattr(CachedStates, "pop", pop)


def taken_from_the_next(patch: Patch) -> None:
    """The pages of another state are given up."""
    plain = CachedStates.pop

    def pop(self: CachedStates, node: Node) -> Any:
        others = [each for each in self._nodes if each is not node and each.state is not None]
        if others and node.state is not None:
            node.state, others[0].state = others[0].state, node.state
        return plain(self, node)

    patch.setattr(CachedStates, "pop", pop)


def gone_while_it_is_read(patch: Patch) -> None:
    """A state that a request is about to begin with is given up for its own pages."""
    plain = RadixTree.evict

    def evict(self: Any, num_pages: int) -> Any:
        read = [node for node in self.states.nodes if node.num_readers]
        eviction = plain(self, num_pages)
        if not read:
            return eviction
        return eviction._replace(pages=np.concatenate([eviction.pages, self.states.pop(read[0])]))

    patch.setattr(RadixTree, "evict", evict)


def entered_in_another_order(patch: Patch) -> None:
    plain = CachedStates.keep
    patch.setattr(CachedStates, "keep", lambda self, node, pages: plain(self, node, pages[::-1].copy()))


def kept_with_one_page_for_all(patch: Patch) -> None:
    plain = CachedStates.keep
    patch.setattr(CachedStates, "keep", lambda self, node, pages: plain(self, node, np.repeat(pages[:1], len(pages))))


def chosen_though_it_is_locked(patch: Patch) -> None:
    """What is least likely to be wanted again goes, whoever computes behind it."""
    patch.setattr(departures, "is_end", lambda node: node.parent is not None)
    forced(patch)


def chosen_though_others_are_behind_it(patch: Patch) -> None:
    patch.setattr(departures, "is_end", lambda node: node.parent is not None and not node.num_locks)
    forced(patch)


def forced(patch: Patch) -> None:
    """Who is chosen goes at once, and no queue asks again whether it may."""
    plain = RadixTree._evict_lowest

    def evict_lowest(self: Any, num_pages: int, saves: Any, leaving: Departures) -> Any:
        lowest = self._queues[0].peek()
        if lowest is None or lowest.state is None or not self.turns.is_known:
            return plain(self, num_pages, saves, leaving)
        node = leaving.pop(lowest)
        gone = node.held
        self.states.leave(node)
        self._num_pages -= len(node.pages)
        self._num_evictable -= len(node.pages)
        self._demote(node, saves)
        return gone

    patch.setattr(RadixTree, "_evict_lowest", evict_lowest)


OF_EVICTION: Final = [
    kept_though_it_went,
    taken_from_the_next,
    gone_while_it_is_read,
    entered_in_another_order,
    kept_with_one_page_for_all,
    chosen_though_it_is_locked,
    chosen_though_others_are_behind_it,
]


def test_without_a_mutant_all_is_right_and_some_go_by_what_is_learned(
    make_pair: type[Pair], learning: list[bool]
) -> None:
    assert is_right(make_pair)
    assert any(learning)


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize("mutant", OF_EVICTION, ids=lambda mutant: mutant.__name__)
def test_each_mutant_of_eviction_changes_tokens_or_is_refused(
    make_pair: type[Pair], monkeypatch: Patch, mutant: Mutant
) -> None:
    mutant(monkeypatch)
    try:
        found = is_right(make_pair)
    except (InvalidTransition, AssertionError, KeyError):
        return
    assert not found


def came_back(change: Callable[[Any, Any], Any]) -> Mutant:
    """A mutant of what pages hold that have come back from host memory, by what they held before."""

    def plant(patch: Patch) -> None:
        plain = LateCopier.advance

        def advance(self: LateCopier) -> bool:
            before = self._pool.copy()
            restores = {number: pages for number, _, pages in self._restores}
            has_ended = plain(self)
            for number in self._ended[-1:] if has_ended else []:
                pages = restores[number]
                self._pool[pages] = change(before[pages], self._pool[pages])
            return has_ended

        patch.setattr(LateCopier, "advance", advance)

    plant.__name__ = change.__name__
    return plant


def dropped(before: Any, arrived: Any) -> Any:
    return before


def zeroed(before: Any, arrived: Any) -> Any:
    return np.zeros_like(arrived)


def shifted_by_a_token(before: Any, arrived: Any) -> Any:
    return np.roll(arrived, 1, axis=-1)


def in_another_order_of_layers(before: Any, arrived: Any) -> Any:
    return arrived[:, ::-1]


def one_page_short(before: Any, arrived: Any) -> Any:
    return np.concatenate([before[:1], arrived[1:]])


@pytest.mark.parametrize("kind", ["states", "windows"])
@pytest.mark.parametrize(
    "mutant",
    [came_back(each) for each in (dropped, zeroed, shifted_by_a_token, in_another_order_of_layers, one_page_short)],
    ids=lambda mutant: mutant.__name__,
)
def test_what_comes_back_damaged_from_host_memory_breaks_a_rule(monkeypatch: Patch, kind: str, mutant: Mutant) -> None:
    beside: dict[str, Any] = {"pages_per_state": 2} if kind == "states" else {"windows": WindowPages(1, 5)}
    mutant(monkeypatch)
    with pytest.raises(RuleBroken):
        seeded(9, num_host_slots=32, **beside).run(1500)
