from __future__ import annotations

import numpy as np

from diptych.common.arrays import U64
from diptych.router.choose.seen_prompts import MAX_NAMES, MAX_PROMPTS, MAX_TOKENS, SeenPrompts


def names(count: int) -> U64:
    return np.arange(count, dtype=np.uint64)


def test_a_prompt_is_noted_by_the_pages_that_a_cache_could_have_had_of_it() -> None:
    """The last token is always computed: so is a last page that it fills."""
    seen = SeenPrompts()
    seen.note(1.0, 32, {16: names(2), 64: names(0)})
    seen.note(2.0, 33, {16: names(2)})
    seen.note(3.0, 5, {16: names(0)})
    assert [(each.seen_s, each.num_tokens, each.page_size, len(each.names)) for each in seen.since(0)] == [
        (1.0, 32, 16, 1),
        (2.0, 33, 16, 2),
        (3.0, 5, 16, 0),
    ]


def test_a_prompt_that_was_not_read_is_not_noted() -> None:
    seen = SeenPrompts()
    seen.note(1.0, 100, {})
    assert (seen.end, seen.since(0)) == (0, [])


def test_who_asks_again_gets_what_is_new() -> None:
    seen = SeenPrompts()
    for number in range(5):
        seen.note(number, 20, {16: names(1)})
    assert [each.seen_s for each in seen.since(3)] == [3, 4]
    assert seen.since(seen.end) == []


def test_the_oldest_are_forgotten_at_so_many_names() -> None:
    seen, size = SeenPrompts(), MAX_NAMES // 4
    for number in range(6):
        seen.note(number, size * 16 + 1, {16: names(size)})
    assert [each.seen_s for each in seen.since(0)] == [2, 3, 4, 5]
    assert seen.end == 6


def test_the_oldest_are_forgotten_at_so_many_prompts() -> None:
    seen = SeenPrompts()
    for number in range(MAX_PROMPTS + 3):
        seen.note(number, 1, {16: names(0)})
    assert len(seen.since(0)) == MAX_PROMPTS
    assert seen.since(0)[0].seen_s == 3


def test_tokens_are_kept_only_where_they_may_be_shown_and_within_bounds() -> None:
    silent, open_ = SeenPrompts(), SeenPrompts(keeps_tokens=True)
    for seen in (silent, open_):
        seen.note(1.0, 3, {16: names(0)}, [1, 2, 3])
    assert [each.token_ids for each in silent.since(0)] == [()]
    assert [each.token_ids for each in open_.since(0)] == [[1, 2, 3]]
    long = range(MAX_TOKENS)
    open_.note(2.0, len(long), {1 << 30: names(0)}, long)
    assert [each.seen_s for each in open_.since(0)] == [2.0]
