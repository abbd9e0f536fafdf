"""Who is named as the holder of a prompt's beginning."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from diptych.router.choose.chooser import Chooser, State
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.policies.policy import HeldPrefix, Worker
from diptych.router.choose.prefix_index import TierPart
from diptych.router.workers.worker_view import Pair, TierPrice, WorkerLoad

PAIRS = [Pair(p, d) for p in (1, 2) for d in (11, 12)]
LINKS = {1: {2, 11, 12}, 2: {1, 11}, 11: {1, 2}, 12: {1}}


def held(cached: Mapping[int, int], **lends: str) -> dict[int, HeldPrefix | None]:
    """Return what each worker may pull; all lend the same, but for those given."""

    def state(key: int) -> State:
        load = WorkerLoad(0, 0, 1 << 20, link_speeds={1: key * 1e9, 2: key * 2e9})
        return State(load, 100, frozenset(LINKS[key]), lends.get(f"w{key}", "equal pages"))

    chooser = Chooser(state, Estimates(), random.Random(0), 0)
    return {key: worker.held for key, worker in chooser.candidates(PAIRS, cached).workers.items()}


def test_it_is_who_has_most_of_those_that_are_linked_and_is_named_to_who_computes_prompts() -> None:
    assert held({1: 160, 2: 32, 11: 320, 12: 640}) == {
        1: HeldPrefix(12, 640, 12e9),
        2: HeldPrefix(11, 320, 22e9),
        11: None,
        12: None,
    }


def test_nobody_is_named_who_has_no_more() -> None:
    assert held({1: 320, 11: 320}) == {1: None, 2: HeldPrefix(1, 320, 2e9), 11: None, 12: None}


@pytest.mark.parametrize("lends", ["", "other pages"])
def test_nobody_is_named_who_lends_nothing_or_has_other_pages(lends: str) -> None:
    assert held({11: 320, 12: 160}, w11=lends)[1] == HeldPrefix(12, 160, 12e9)
    assert held({11: 320}, w1=lends)[1] is None


def test_one_that_is_gone_is_not_named() -> None:
    assert held({99: 320})[1] is None


TIERS = (TierPrice("host", 0.0, 1e-6), TierPrice("files", 0.002, 1e-5), TierPrice("shared", math.inf))


def told(lower: Mapping[int, Sequence[TierPart]], cached: Mapping[int, int]) -> Mapping[int, Worker]:
    load = WorkerLoad(0, 0, 1 << 20, tiers=TIERS)
    chooser = Chooser(lambda key: State(load, 100, frozenset(LINKS[key]), "equal"), Estimates(), random.Random(0), 0)
    return chooser.candidates(PAIRS, cached, lower).workers


def test_what_lies_in_tiers_has_the_price_of_its_worker_up_to_where_nothing_is_loaded() -> None:
    parts = [TierPart(1, 100, 300), TierPart(2, 300, 800), TierPart(3, 800, 900), TierPart(1, 900, 950)]
    worker = told({1: parts}, {1: 950})[1]
    assert (worker.cached_tokens, worker.pool_tokens) == (800, 100)
    assert [load[:3] for load in worker.loads] == [("host", 100, 300), ("files", 300, 800)]
    assert [load.load_s for load in worker.loads] == pytest.approx([0.0002, 0.007])
    assert told({1: [TierPart(3, 100, 300)]}, {1: 300})[1].cached_tokens == 100
    assert told({1: [TierPart(4, 100, 300)]}, {1: 300})[1].cached_tokens == 100, "a tier that was not told of"


def test_a_holder_lends_what_is_in_its_pool_and_no_more() -> None:
    workers = told({2: [TierPart(2, 64, 320)]}, {2: 320, 11: 160})
    assert workers[1].held is not None
    assert (workers[1].held.instance_id, workers[1].held.num_tokens) == (11, 160)
    alone = told({2: [TierPart(2, 64, 320)]}, {2: 320})[1].held
    assert alone is not None
    assert (alone.instance_id, alone.num_tokens) == (2, 64)
