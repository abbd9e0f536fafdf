"""Which text goes next while pages are evicted: the same as if all were looked at for each, at the cost of one look."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree import departures
from diptych.engine.cache.tree.departures import Departures, is_end
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.cache.turns import Kind
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams

PAGE, PER_STATE, NUM_PAGES, NUM_PROMPTS = 4, 3, 4000, 700


def full_cache(seed: int) -> KvCache:
    """Conversations fork and go on, as many as there is room for, and it is learned which do."""
    cache, rng, texts = new_cache(), random.Random(seed), list[list[int]]()
    for each in range(NUM_PROMPTS):
        if not texts or rng.random() < 0.5:
            text = [rng.randrange(3)] * 8 + [each * 100 + i for i in range(rng.randint(4, 60))]
        else:
            text = rng.choice(texts[-12:])[: rng.randint(4, 90)] + [each * 100 + i for i in range(rng.randint(1, 30))]
        texts.append(text)
        compute(cache, text)
    assert cache.tree.turns.is_known
    return cache


def new_cache() -> KvCache:
    return KvCache(
        num_pages=NUM_PAGES, page_size=PAGE, max_requests=1, max_tokens_per_request=1000, pages_per_state=PER_STATE
    )


def compute(cache: KvCache, text: list[int]) -> None:
    request = new_request(0, np.array(text), SamplingParams(max_tokens=1))
    assert cache.admit(request)
    for end in request.cuts:
        cache.begin_snapshot(request, end)
        cache.release_duplicates(cache.share(request, end))
    request.computed_len = len(text)
    cache.retire(request)


@pytest.fixture
def num_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[KvCache], list[int]]:
    """Let the returned list grow with each text whose promise is asked for."""

    def watch(cache: KvCache) -> list[int]:
        looks, index = list[int](), cache.tree.turns.index

        def counted(kind: Kind, num_pages: int) -> float:
            looks.append(num_pages)
            return index(kind, num_pages)

        monkeypatch.setattr(cache.tree.turns, "index", counted)
        return looks

    return watch


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_texts_go_as_if_all_were_looked_at_for_each(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    once, each = full_cache(seed), full_cache(seed)
    gone = once.tree.evict(NUM_PAGES // 2).pages

    def pop(self: Departures, lowest: Node) -> Node:
        return min(filter(is_end, self._nodes), key=self._promise)

    monkeypatch.setattr(Departures, "pop", pop)
    assert gone.tolist() == each.tree.evict(NUM_PAGES // 2).pages.tolist()


def test_many_texts_that_go_at_once_cost_one_look_at_all(num_looks: Callable[[KvCache], list[int]]) -> None:
    cache = full_cache(1)
    looks, before = num_looks(cache), len(cache.tree.states.nodes)
    cache.tree.evict(NUM_PAGES // 2)
    num_gone = before - len(cache.tree.states.nodes)
    assert num_gone > 50
    assert len(looks) <= before + 5 * num_gone, (len(looks), before, num_gone)


def test_of_very_many_texts_some_are_looked_at_and_others_next_time(
    num_looks: Callable[[KvCache], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "MAX_SEEN", 40)
    cache = full_cache(1)
    looks = num_looks(cache)
    while not looks:
        assert len(cache.tree.evict(1).pages)
    assert len(looks) <= 40 + 5
    nodes = list(cache.tree.states.nodes)
    steps = -(-len(nodes) // 40)
    seen = [node for time in range(steps) for node in Departures(nodes, lambda _: 0.0, time)._seen()]
    assert sorted(map(id, seen)) == sorted(map(id, nodes))
