"""What is learned of conversations: whether they go on, and after how long; and which text goes by it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.turns import LEARNED, MAX_ENDS, UNKNOWN, Turns, age_of, ages_of
from diptych.engine.values.core_report import Holders
from diptych.engine.values.policy_names import EvictionPolicy
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams

PAGE, PER_STATE, MANY, NUM_EACH = 64, 3, 512, 160
SOON, LATE = 100, 3000  # pages, after which conversations of two sorts go on
ONE = SamplingParams(max_tokens=1)
NOBODY = Holders([], [], [])


def test_a_prompt_behind_the_end_of_another_one_is_the_next_turn_however_long_ago_that_was_evicted() -> None:
    turns = Turns(PAGE)
    assert turns.note([1, 2, 3], 10)[0] == 1
    assert turns.note([7, 8], 20)[0] == 1
    assert turns.note([1, 2, 3, 4, 5], 30)[0] == 2
    assert turns.note([1, 2, 3, 4, 5], 40)[0] == 2


def test_where_texts_part_conversations_begin() -> None:
    turns = Turns(PAGE)
    turns.note([1], 0)
    assert turns.note([1, 2], 1)[0] == 2
    assert turns.note([1, 3], 2)[0] == 1
    assert turns.note([1, 2, 4], 3)[0] == 2


def test_prompts_are_told_apart_by_how_much_of_them_is_new() -> None:
    turns = Turns(PAGE)
    assert [turns.note([each * 1000 + i for i in range(n)], 0)[1] for each, n in enumerate((1, 7, 8, 16, 64), 1)] == [
        *(0, 0, 1, 2, 4)
    ]
    assert turns.note([5000 + i for i in range(64 + 8)], 0) == (2, 1)


def test_a_prompt_of_no_whole_page_is_of_no_kind() -> None:
    assert Turns(PAGE).note([], 0) == UNKNOWN


def test_ends_are_forgotten_in_the_order_of_their_last_use() -> None:
    turns = Turns(PAGE)
    turns.note([1], 0)
    turns.note([2], 0)
    for each in range(MAX_ENDS - 1):
        turns.note([1, 10 + each] if each == 7 else [10 + each], 0)
    assert turns.note([2, 3], 0)[0] == 1
    assert turns.note([1, 17, 4], 0)[0] > 1


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 100, 10**6])
def test_ages_are_quarter_octaves(num_pages: int) -> None:
    assert 2 ** (age_of(num_pages) / 4) <= num_pages * (1 + 1e-9) < 2 ** ((age_of(num_pages) + 1) / 4) * (1 + 1e-9)


def test_ages_of_many_are_those_of_each() -> None:
    nums = [*range(3000), *(2**power + step for power in range(12, 30) for step in (-1, 0, 1))]
    assert ages_of(nums).tolist() == [age_of(num) for num in nums]


def taught() -> Turns:
    """Eight of ten short prompts go on, soon; two of ten long ones do, late."""
    turns, now, due = Turns(PAGE), 0, dict[int, list[int]]()
    for each in range(2 * MANY):
        now += 10
        is_short = each % 2 == 0
        names = [each * 1000 + i + 1 for i in range(4 if is_short else 64)]
        turns.note(names, now)
        if each % 20 < 16 if is_short else each % 20 < 4:
            due.setdefault((now + (SOON if is_short else LATE)) // 10, []).extend([each])
        for one in due.pop(now // 10, []):
            turns.note([one * 1000 + i + 1 for i in range(4 if one % 2 == 0 else 64)] + [-one - 1] * 2, now)
    return turns


def test_what_goes_on_more_often_and_sooner_is_worth_more_for_its_time() -> None:
    turns = taught()
    short, long = (1, 0), (1, 4)
    assert turns.index(short, 1) > 5 * turns.index(long, 1)


def test_what_has_not_gone_on_when_others_had_is_worth_little_and_what_is_about_to_much() -> None:
    turns = taught()
    short, long = (1, 0), (1, 4)
    assert turns.index(short, 2000) < turns.index(short, 1) / 20
    assert turns.index(long, LATE - 200) > 1.5 * turns.index(long, 1)
    assert turns.index(long, LATE - 200) > turns.index(short, LATE - 200)


def test_a_kind_that_was_never_seen_is_taken_for_any() -> None:
    turns = taught()
    assert turns.index((2, 9), 5) == turns.index(UNKNOWN, 5)


def test_the_first_prompts_already_teach() -> None:
    turns = Turns(PAGE)
    for each in range(1, LEARNED):
        turns.note([each], each)
    assert not turns.is_known
    turns.note([LEARNED], LEARNED)
    assert turns.is_known


def new_cache(page_size: int, num_pages: int, policy: EvictionPolicy = "lru") -> KvCache:
    return KvCache(
        eviction_policy=policy,
        num_pages=num_pages,
        page_size=page_size,
        max_requests=3,
        max_tokens_per_request=100 * page_size,
        pages_per_state=PER_STATE,
    )


def compute(cache: KvCache, tokens: I64) -> int:
    """Compute a prompt as steps do, and let it go; return how much of it was found."""
    request = new_request(len(tokens), tokens, ONE)
    assert cache.admit(request)
    found = request.cached_len
    for end in request.cuts:
        cache.begin_snapshot(request, end)
        cache.release_duplicates(cache.share(request, end))
    request.computed_len = len(tokens)
    cache.retire(request)
    return found


def found_again(policy: EvictionPolicy) -> list[int]:
    """Long prompts come once; short ones come back, when more came meanwhile than the pool can hold."""
    cache, away, found = new_cache(PAGE, 400, policy), list[I64](), list[int]()
    for each in range(NUM_EACH):
        long = np.arange(1_000_000 * each, 1_000_000 * each + 80 * PAGE)
        compute(cache, long)
        away.append(long[: 10 * PAGE + 1] + 500_000)
        compute(cache, away[-1])
        if len(away) > 6:
            first = away.pop(0)
            found.append(compute(cache, np.append(first, -first[:PAGE])))
    assert cache.audit(NOBODY) == []
    return found


def test_conversations_that_go_on_stay_though_others_were_used_later() -> None:
    found = found_again("lru")
    assert max(found[: LEARNED // 4]) == 0
    assert min(found[-100:]) == 10 * PAGE


def test_what_is_used_often_stays_by_lfu_whatever_was_learned() -> None:
    assert max(found_again("lfu")[-100:]) == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_no_page_is_lost_where_texts_are_chosen_by_what_was_learned(seed: int) -> None:
    rng, cache, texts = random.Random(seed), new_cache(4, 150), list[list[int]]()
    for each in range(MANY):
        if not texts or rng.random() < 0.4:
            text = [rng.randrange(3), *[each * 100 + i for i in range(rng.randint(4, 80))]]
        else:
            text = rng.choice(texts[-12:])[: rng.randint(4, 90)] + [each * 100 + i for i in range(rng.randint(1, 30))]
        texts.append(text)
        compute(cache, np.array(text))
        if each > MANY // 2:
            assert cache.audit(NOBODY) == []
    assert cache.tree.turns.is_known
