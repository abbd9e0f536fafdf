"""Every state that a room can reach between workers whose pages and ranks are unlike: of tokens, windows and states.

Each rank's part of a write lands by itself, by the plans of the transfer engine. What a fault of a conversion does is
found there, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from simulation.explore import explore
from simulation.rules import RuleBroken
from simulation.sides import Operation
from simulation.two_sides import Budget, TwoSides

from diptych.decode.imports import Imports
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.plan import Copies
from diptych.kvtransfer.state_plan import StateRun
from diptych.kvtransfer.transport import PageWrite
from diptych.prefill.sending import Sender

DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="takes a minute")
SINGLE, CHUNKED = ((1, 2, 3),), ((1, 2, 3, 1, 2, 3),)
ODD = ((1, 2, 3, 1, 2),)  # its window begins within a page of 4, and prefill has passed a page of 2
Patch = pytest.MonkeyPatch


def tokens(budget: Budget, sizes: tuple[int, int], ranks: tuple[int, int]) -> TwoSides:
    return TwoSides(SINGLE, budget, prefill_pages=4, decode_pages=4, page_sizes=sizes, num_ranks=ranks)


def windows(budget: Budget, sizes: tuple[int, int], ranks: tuple[int, int]) -> TwoSides:
    shape: dict[str, Any] = {"page_sizes": sizes, "num_ranks": ranks, "windows": WindowPages(1, 2)}
    return TwoSides(ODD, budget, prefill_pages=10, decode_pages=9, **shape)


def states(budget: Budget, sizes: tuple[int, int], ranks: tuple[int, int]) -> TwoSides:
    shape: dict[str, Any] = {"page_sizes": sizes, "num_ranks": ranks, "num_state_cells": 8}
    return TwoSides(CHUNKED, budget, prefill_pages=12, decode_pages=9, **shape)


World = Callable[[Budget, tuple[int, int], tuple[int, int]], TwoSides]
LARGER, SMALLER = (2, 4), (4, 2)  # pages
APART, TOGETHER = (1, 2), (2, 1)  # ranks


@pytest.mark.parametrize(
    ("world", "budget", "sizes", "ranks"),
    [
        (tokens, Budget(aborts=1), SMALLER, TOGETHER),
        (tokens, Budget(failures=1), LARGER, TOGETHER),
        (tokens, Budget(damages=1), LARGER, APART),
        (windows, Budget(), SMALLER, TOGETHER),
        (windows, Budget(), LARGER, APART),
        (states, Budget(), SMALLER, TOGETHER),
        (states, Budget(), LARGER, APART),
        *(
            pytest.param(*case, marks=DEEP)
            for case in (
                (windows, Budget(aborts=1), LARGER, APART),
                (windows, Budget(losses=1), SMALLER, TOGETHER),
                (states, Budget(failures=1), SMALLER, TOGETHER),
                (states, Budget(aborts=1), SMALLER, TOGETHER),
                (states, Budget(losses=1), LARGER, APART),
            )
        ),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_room_between_unlike_workers_is_right_in_every_state(
    world: World, budget: Budget, sizes: tuple[int, int], ranks: tuple[int, int]
) -> None:
    graph = explore(world(budget, sizes, ranks))
    assert len(graph.came_from) > 50
    assert graph.at_rest


# what is planted


def parts_stay_apart(patch: Patch) -> None:
    """What two ranks wrote is not put together."""
    patch.setattr(Imports, "_assemble", Imports._accept)


def a_state_is_put_together_as_text(patch: Patch) -> None:
    plain = Imports._assemble

    def assemble(self: Any, room: Any, now_s: float) -> None:
        num_pages, self._cache.pages_per_state = self._cache.pages_per_state, 0
        plain(self, room, now_s)
        self._cache.pages_per_state = num_pages

    patch.setattr(Imports, "_assemble", assemble)


def one_rank_is_enough(patch: Patch) -> None:
    """A write counts as done when a part of it has landed."""
    patch.setattr(Operation, "has_landed", property(lambda self: len(self.parts) < 2))


def a_window_begins_where_prefill_has_a_page(patch: Patch) -> None:
    plain = Copies.cut

    def cut(self: Copies, write: PageWrite) -> Any:
        return plain(self, replace(write, skip_tokens=0))

    patch.setattr(Copies, "cut", cut)


def a_window_is_told_as_whole(patch: Patch) -> None:
    """Decode takes what prefill had passed for what others may see."""
    plain = KvCache.handed

    def handed(self: Any, request: Any, given_len: int, page_size: int) -> Any:
        groups = plain(self, request, given_len, page_size)
        first = self.windows.first_live(request.prompt_len, page_size) * page_size
        return tuple(replace(each, first_token=first) if each.kind == "window" else each for each in groups)

    patch.setattr(KvCache, "handed", handed)


def a_rank_s_share_begins_a_row_late(patch: Patch) -> None:
    plain = StateRun.cut
    patch.setattr(StateRun, "cut", lambda self, src, dst: plain(replace(self, first_row=self.first_row + 1), src, dst))


def a_state_is_not_sent(patch: Patch) -> None:
    patch.setattr(Sender, "_write_state", lambda *_: None)


def a_state_goes_as_tokens(patch: Patch) -> None:
    plain = Copies.cut
    patch.setattr(Copies, "cut", lambda self, write: plain(self, replace(write, as_bytes=False)))


PLANTED: Final = [
    (parts_stay_apart, tokens, SMALLER, TOGETHER),
    (one_rank_is_enough, tokens, LARGER, TOGETHER),
    (a_window_begins_where_prefill_has_a_page, windows, SMALLER, TOGETHER),
    (a_window_is_told_as_whole, windows, LARGER, APART),
    (a_state_is_put_together_as_text, states, SMALLER, TOGETHER),
    (a_rank_s_share_begins_a_row_late, states, LARGER, APART),
    (a_state_is_not_sent, states, LARGER, APART),
    (a_state_goes_as_tokens, states, SMALLER, TOGETHER),
]


@pytest.mark.parametrize(("plant", "world", "sizes", "ranks"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_fault_of_a_conversion_is_found(
    plant: Callable[[Patch], None],
    world: World,
    sizes: tuple[int, int],
    ranks: tuple[int, int],
    monkeypatch: Patch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(RuleBroken):
        explore(world(Budget(), sizes, ranks))
