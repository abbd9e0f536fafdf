from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from diptych.generation.page_hash import page_hashes
from diptych.router.choose.seen_prompts import SeenPrompts
from diptych.router.console.cache.hot_prefixes import DEPTHS, Chain, HotPrefix, chain_of, hottest
from diptych.router.console.pieces import at_once


def chain(*pages: int, page_size: int = 16) -> Chain:
    """A prompt whose pages have these names; the name of a page tells all before it, too."""
    return Chain(page_size, np.array(pages, np.uint64), ())


def test_a_prefix_ends_where_its_requests_part() -> None:
    chains = [chain(1, 2, 3, 10), chain(1, 2, 3, 11), chain(1, 2, 3, 11), chain(1, 20), chain(7)]
    assert at_once(hottest(chains, 9)) == [
        HotPrefix(3, 1, 16, 48, 3, ()),
        HotPrefix(11, 3, 16, 64, 2, ()),
        HotPrefix(1, None, 16, 16, 4, ()),
    ]


def test_below_a_prefix_that_is_not_shown_the_next_one_above_is_the_parent() -> None:
    chains = [chain(1, *range(2, 12), 50), *[chain(1, *range(2, 12), 60, 70)] * 9, *[chain(1)] * 400]
    found = at_once(hottest(chains, 2))
    assert [(each.name, each.parent) for each in found] == [(1, None), (70, 1)]


def test_nobody_has_anything_in_common() -> None:
    assert at_once(hottest([], 5)) == []
    assert at_once(hottest([chain(), chain(1), chain(2, 3)], 5)) == []


def test_pages_of_two_sizes_are_two_things() -> None:
    found = at_once(hottest([chain(1, 2)] * 2 + [chain(5, page_size=64)] * 2, 5))
    assert {(each.name, each.num_tokens) for each in found} == {(2, 32), (5, 64)}


def test_depths_grow_by_a_sixteenth_and_contain_each_doubling() -> None:
    assert DEPTHS[:33].tolist() == [*range(1, 33), 34]
    steps = np.diff(DEPTHS)
    assert (steps > 0).all()
    assert (steps <= np.maximum(1, DEPTHS[:-1] // 16)).all()
    assert {1 << power for power in range(20)} <= set(DEPTHS.tolist())


def test_counts_are_exact_whatever_the_lengths() -> None:
    rng = random.Random(2)
    texts = [[rng.randrange(1000) for _ in range(rng.choice((300, 3000)))] for _ in range(6)]
    prompts = [
        text[: rng.randrange(40, len(text))] + [rng.randrange(1000) for _ in range(rng.randrange(200))]
        for text in rng.choices(texts, k=80)
    ]
    seen = SeenPrompts()
    for prompt in prompts:
        seen.note(0.0, len(prompt), {4: page_hashes(np.array(prompt), 4)})
    having: Counter[int] = Counter(itertools.chain.from_iterable(each.names.tolist() for each in seen.since(0)))
    found = at_once(hottest([chain_of(each) for each in seen.since(0)], 1000))
    assert len(found) > 20
    assert [each.num_requests for each in found] == [having[each.name] for each in found]
    by_name = {each.name: each for each in found}
    for each in found:
        if each.parent is not None:
            parent = by_name[each.parent]
            assert parent.num_tokens < each.num_tokens
            assert parent.num_requests >= each.num_requests
    saved = [
        4 * count * (having[int(name)] - 1)
        for text in texts
        for count, name in enumerate(page_hashes(np.array(text), 4), 1)
    ]
    best = max(saved)
    saved_first = found[0].num_tokens * (found[0].num_requests - 1)  # tokens that one request alone computed
    assert saved_first == pytest.approx(best, rel=1 / 16)
