"""Rounds of schedulers that share experts: all know the same of each, whoever speaks first."""

from __future__ import annotations

import random
from collections import deque

import pytest

from diptych.engine.values.rounds import NOTHING, Part, Round, Rounds


@pytest.mark.parametrize("seed", range(20))
def test_all_close_the_same_rounds_in_any_order_of_messages(seed: int) -> None:
    """Each speaks as soon as it may, and each pair's messages keep their order."""
    rng, size, wanted = random.Random(seed), 3, 12
    every = [Rounds(own, size) for own in range(size)]
    wires: dict[tuple[int, int], deque[tuple[int, Part]]] = {(a, b): deque() for a in range(size) for b in range(size)}
    said: list[Part | None] = [None] * size
    closed: list[list[Round]] = [[] for _ in range(size)]
    while min(map(len, closed)) < wanted:
        own = rng.randrange(size)
        if said[own] is None and (len(closed[own]) < wanted):
            said[own] = part = Part(rng.randrange(9), rng.randrange(3))
            for other in set(range(size)) - {own}:
                wires[own, other].append((every[own].number, part))
        source = rng.randrange(size)
        if wires[source, own]:
            every[own].hear(source, *wires[source, own].popleft())
        part_of_own = said[own]
        if part_of_own is not None and (found := every[own].close(part_of_own)) is not None:
            closed[own].append(found)
            said[own] = None
    assert closed[0] == closed[1] == closed[2]


def test_a_scheduler_is_called_while_somebody_waits_for_it() -> None:
    rounds = Rounds(1, 2)
    assert not rounds.is_called
    rounds.hear(0, 0, Part(5, 1))
    assert rounds.is_called
    assert rounds.close(NOTHING) == Round((Part(5, 1), NOTHING))
    assert not rounds.is_called


def test_the_last_layer_is_computed_where_anybody_wants_logits_and_sizes_are_the_largest() -> None:
    assert not Round((Part(64, 0), NOTHING)).are_any_picked
    common = Round((Part(64, 1), Part(2, 2)))
    assert common.are_any_picked
    assert (common.num_rows(is_last=False), common.num_rows(is_last=True)) == (64, 2)


def test_a_round_is_plain_if_nobody_has_another_step() -> None:
    plain = Part(3, 3, is_plain=True)
    assert Round((plain, NOTHING)).are_plain
    assert not Round((plain, Part(3, 3))).are_plain


def test_a_round_has_halves_where_anybody_has_two_micro_batches() -> None:
    cut, whole = Part(9, 4, late_tokens=3, late_picked=1), Part(5, 2)
    assert Round((whole, NOTHING)).halves is None
    assert Round((cut, whole, NOTHING)).halves == (
        Round((Part(6, 3), Part(5, 2), Part(0, 0))),
        Round((Part(3, 1), Part(0, 0), Part(0, 0))),
    )
