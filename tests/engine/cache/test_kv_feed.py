from __future__ import annotations

from diptych.engine.cache.cache_changes import CacheDelta
from diptych.engine.cache.kv_feed import KvFeeds, KvMessage


def test_a_feed_begins_with_everything_and_goes_on_with_changes() -> None:
    feeds = KvFeeds()
    feeds.add(CacheDelta(stored=(1, 2, 3)))
    feed = feeds.open()
    assert feed.pop() == KvMessage(1, CacheDelta(cleared=True, stored=(1, 2, 3)))
    assert feed.pop() is None
    feeds.add(CacheDelta(removed=(3,), stored=(4,)))
    assert feed.pop() == KvMessage(2, CacheDelta(removed=(3,), stored=(4,)))
    assert feed.pop() is None


def test_an_empty_cache_is_news_too() -> None:
    assert KvFeeds().open().pop() == KvMessage(1, CacheDelta(cleared=True))


def test_long_news_comes_in_parts() -> None:
    feeds = KvFeeds()
    feeds.add(CacheDelta(stored=(1, 2, 3)))
    feed = feeds.open()
    assert feed.pop(2) == KvMessage(1, CacheDelta(cleared=True, stored=(1, 2)), more=True)
    assert feed.pop(2) == KvMessage(2, CacheDelta(stored=(3,)))


def test_a_part_that_was_announced_comes_even_if_it_has_become_empty() -> None:
    feeds = KvFeeds()
    feeds.add(CacheDelta(stored=(1, 2, 3)))
    feed = feeds.open()
    feed.pop(2)
    feeds.add(CacheDelta(removed=(3,)))
    assert feed.pop(2) == KvMessage(2, CacheDelta())


def test_each_feed_has_its_own_numbers() -> None:
    feeds = KvFeeds()
    first = feeds.open()
    first.pop()
    feeds.add(CacheDelta(stored=(1,)))
    second = feeds.open()
    assert (first.pop(), second.pop()) == (
        KvMessage(2, CacheDelta(stored=(1,))),
        KvMessage(1, CacheDelta(cleared=True, stored=(1,))),
    )


def test_starting_again_tells_everything_under_the_next_number() -> None:
    feeds = KvFeeds()
    feed = feeds.open()
    feeds.add(CacheDelta(stored=(1,)))
    feed.pop()
    feeds.add(CacheDelta(stored=(2,)))
    feeds.start_again(feed)
    assert feed.pop() == KvMessage(2, CacheDelta(cleared=True, stored=(1, 2)))


def test_a_cleared_cache_is_told_as_such() -> None:
    feeds = KvFeeds()
    feeds.add(CacheDelta(stored=(1,)))
    feed = feeds.open()
    feed.pop()
    feeds.add(CacheDelta(cleared=True, stored=(2,)))
    assert feed.pop() == KvMessage(2, CacheDelta(cleared=True, stored=(2,)))
    assert feeds.open().pop() == KvMessage(1, CacheDelta(cleared=True, stored=(2,)))


def test_a_closed_feed_hears_nothing() -> None:
    feeds = KvFeeds()
    feed = feeds.open()
    feed.pop()
    feeds.close(feed)
    feeds.add(CacheDelta(stored=(1,)))
    assert feed.pop() is None


def test_a_feed_tells_where_pages_have_moved() -> None:
    feeds = KvFeeds()
    feeds.add(CacheDelta(stored=(1, 2, 3)))
    early = feeds.open()
    early.pop()
    feeds.add(CacheDelta(below=((1, (2, 3)),)))
    late = feeds.open()
    assert early.pop() == KvMessage(2, CacheDelta(below=((1, (2, 3)),)))
    assert late.pop() == KvMessage(1, CacheDelta(cleared=True, stored=(1,), below=((1, (2, 3)),)))
    feeds.add(CacheDelta(removed=(3,), stored=(2,)))
    feeds.add(CacheDelta(below=((1, (3,)),)))
    wanted = CacheDelta(stored=(2,))
    assert (early.pop(), late.pop()) == (KvMessage(3, wanted), KvMessage(2, wanted)), "one came and went"
