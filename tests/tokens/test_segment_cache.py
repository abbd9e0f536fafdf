"""The bound in bytes, and who goes first."""

from __future__ import annotations

import random

from diptych.tokens.segment_cache import MAX_SHARE, SegmentCache

TOKENS = bytes(8)


def test_the_least_recently_used_segment_goes_first() -> None:
    cache = SegmentCache(1400)  # room for four
    cache.add(dict.fromkeys("abcd", TOKENS))
    assert cache.find(["a", "x", "c"]) == [TOKENS, None, TOKENS]
    cache.add(dict.fromkeys("ef", TOKENS))
    assert cache.find(list("abcdef")) == [TOKENS, None, TOKENS, None, TOKENS, TOKENS]


def test_what_one_namespace_knows_is_unknown_in_another() -> None:
    cache = SegmentCache(4000)
    cache.add({"a": TOKENS}, b"alice")
    cache.add({"a": bytes(4)}, b"bob")
    assert [cache.find(["a"], namespace) for namespace in (b"alice", b"bob", b"")] == [[TOKENS], [bytes(4)], [None]]


def test_a_segment_that_would_push_out_many_is_not_kept() -> None:
    cache = SegmentCache(4000)
    cache.add({"kept": TOKENS, "long": bytes(4000 // MAX_SHARE), "x" * 1000: TOKENS})
    assert cache.find(["kept", "long", "x" * 1000]) == [TOKENS, None, None]


def test_what_is_kept_stays_within_the_bound() -> None:
    draw, cache = random.Random(1), SegmentCache(10_000)
    for number in range(2000):
        text = str(number) * draw.randrange(1, 100)
        cache.find([text])
        cache.add({text: bytes(4 * draw.randrange(1, 200))})
        assert cache.num_bytes <= 10_000
    assert len(cache) > 5
