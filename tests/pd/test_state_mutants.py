"""Bugs planted in what becomes of states of recurrent layers: each changes tokens, or is refused.

A model that goes on from a wrong state is as fluent as ever, and no benchmark notices: that has happened (a model of 93
layers decoded 69 of them from a cleared state). So each mistake that we could think of is made here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, expected_output, folded, new_states

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.values.batch import StateMoves
from diptych.prefill.room import PrefillRoom
from diptych.prefill.sending import Sender

VOCAB, PAGE, PER_STATE = 1000, 4, 2
HEAD = [(5 * i) % VOCAB for i in range(22)]
PROMPTS: Final = [
    HEAD,
    [*HEAD, 61, 62, 63],
    [*HEAD[:17], 71, 72],
    [*HEAD[:17], 81, 82],
    [*HEAD[:17], 81, 83, 84, 85, 86],
]
NUM_OUTPUTS = 9
Patch = pytest.MonkeyPatch
Pair = Any  # the fixture's class: test helpers can't be imported


def recurrent_model(num_pages: int) -> tuple[Any, RecurrentRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(16, PER_STATE * PAGE), VOCAB)


def is_right(make_pair: type[Pair], integrity: str) -> bool:
    """Play prompts that begin alike, one after the other and then together, where decode runs short of pages."""
    rules = dataclasses.replace(make_pair.__init__.__kwdefaults__["rules"], integrity=integrity)
    pair = make_pair(
        model=recurrent_model,
        pages_per_state=PER_STATE,
        decode_pages=36,
        prefill_pages=80,
        rules=rules,
        check_every=1000,
    )
    for room, prompt in enumerate(PROMPTS, 1):
        pair.start(room, prompt, max_tokens=NUM_OUTPUTS)
        pair.run()
    for room, prompt in enumerate(PROMPTS, 11):
        pair.start(room, prompt, max_tokens=5 * NUM_OUTPUTS)
    pair.run()
    assert pair.decode.core.report().counts.retractions > 0 or pair.decode.ended(1).failure
    rooms = [(room + more, prompt) for room, prompt in enumerate(PROMPTS, 1) for more in (0, 10)]
    return all(
        pair.tokens(room) == expected_output(prompt, NUM_OUTPUTS * (5 if room > 10 else 1), VOCAB, PER_STATE * PAGE)
        for room, prompt in rooms
    )


def never_sent(patch: Patch) -> None:
    patch.setattr(Sender, "_write_state", lambda self, room, now_s: None)


def sent_in_another_order(patch: Patch) -> None:
    plain = PrefillRoom.destination_beside
    patch.setattr(PrefillRoom, "destination_beside", lambda self, num_pages: plain(self, num_pages)[::-1].copy())


def moved(change: Callable[[StateMoves], StateMoves]) -> Callable[[Patch], None]:
    """A mutant of what a step is told."""

    def plant(patch: Patch) -> None:
        plain = RecurrentRunner.logits

        def logits(self: Any, batch: Any) -> list[int]:
            return plain(self, dataclasses.replace(batch, states=change(batch.states)))

        patch.setattr(RecurrentRunner, "logits", logits)

    plant.__name__ = change.__name__
    return plant


@moved
def never_cleared(moves: StateMoves) -> StateMoves:
    return dataclasses.replace(moves, cleared=moves.cleared[:0])


@moved
def never_read(moves: StateMoves) -> StateMoves:
    return dataclasses.replace(moves, read_slots=moves.read_slots[:0], read_pages=moves.read_pages[:0])


@moved
def cleared_where_it_should_be_read(moves: StateMoves) -> StateMoves:
    cleared = np.concatenate([moves.cleared, moves.read_slots])
    return dataclasses.replace(moves, cleared=cleared, read_slots=moves.read_slots[:0], read_pages=moves.read_pages[:0])


@moved
def never_copied(moves: StateMoves) -> StateMoves:
    return dataclasses.replace(moves, written_slots=moves.written_slots[:0], written_pages=moves.written_pages[:0])


@moved
def copied_from_the_next_slot(moves: StateMoves) -> StateMoves:
    return dataclasses.replace(moves, written_slots=(moves.written_slots + 1) % 16)


@moved
def read_without_its_last_page(moves: StateMoves) -> StateMoves:
    pages = moves.read_pages.copy()
    pages[:, -1] = 0
    return dataclasses.replace(moves, read_pages=pages)


@moved
def in_the_slot_of_another(moves: StateMoves) -> StateMoves:
    """Only while several run."""
    return dataclasses.replace(moves, slots=np.roll(moves.slots, 1))


def advanced_twice(patch: Patch) -> None:
    """By the token behind what was handed over."""
    plain = RecurrentRunner.logits

    def logits(self: Any, batch: Any) -> list[int]:
        tokens = plain(self, batch)
        for slot in batch.states.read_slots:
            self._states[slot] = folded(self._states[slot], np.uint64(batch.input_ids[0]))
        return tokens

    patch.setattr(RecurrentRunner, "logits", logits)


def snapshots_behind_their_text(patch: Patch) -> None:
    """A state stands one node higher than the text that it has seen."""
    plain = KvCache._keep_snapshots

    def keep_higher(self: Any, request: Any, node: Any, num_tokens: int) -> None:
        had, tree = node.state, self.tree
        plain(self, request, node, num_tokens)
        if node.state is not None and had is None and len(node.pages) > 1:
            upper = node.split(len(node.pages) - 1, PAGE)
            tree._ranking.touch(upper)
            tree._queues[0].add(upper)
            tree.states.keep(upper, tree.states.pop(node))

    patch.setattr(KvCache, "_keep_snapshots", keep_higher)


def begun_with_text_alone(patch: Patch) -> None:
    """Where pages are cached, a request begins there, with a state or without."""
    patch.setattr(RadixTree, "match_state", RadixTree.match)


def kept_by_a_request_that_computes_again(patch: Patch) -> None:
    """One that was retracted, and whose row is another now, goes on from its slot."""
    begin = KvCache._begin_state

    def begin_again(self: Any, request: Any, match: Any, pages: Any) -> None:
        begin(self, request, match, pages)
        if request.num_output_tokens:
            request.state_from = None

    patch.setattr(KvCache, "_begin_state", begin_again)


MUTANTS: Final = [
    never_sent,
    sent_in_another_order,
    never_cleared,
    never_read,
    cleared_where_it_should_be_read,
    never_copied,
    copied_from_the_next_slot,
    read_without_its_last_page,
    in_the_slot_of_another,
    advanced_twice,
    snapshots_behind_their_text,
    begun_with_text_alone,
    kept_by_a_request_that_computes_again,
]


@pytest.mark.parametrize("integrity", ["always", "off"])
def test_without_a_mutant_all_is_right(make_pair: type[Pair], integrity: str) -> None:
    assert is_right(make_pair, integrity)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_changes_tokens_or_is_refused(
    make_pair: type[Pair], monkeypatch: Patch, mutant: Callable[[Patch], None]
) -> None:
    mutant(monkeypatch)
    assert not is_right(make_pair, "off")
