"""Sessions that have called a tool, in a whole cache: what is kept for them, for how long, and who gives way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from diptych.engine.cache import sessions
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.peer_pages import PeerPages
from diptych.engine.cache.return_times import ReturnTimes, ToolKey
from diptych.engine.cache.sessions import BACK_S, MAX_EARLY
from diptych.engine.cache.tree.pins import Pin
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Account, Life
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


class World:
    """A cache of 20 pages, and requests that come and go at once."""

    def __init__(self, pin_share: float = 0.5) -> None:
        self.cache = KvCache(
            num_pages=21, page_size=PAGE, max_requests=8, max_tokens_per_request=200, pin_share=pin_share
        )
        self._rooms = iter(range(1, 1 << 20))

    def request(self, text: range, now_s: float, account: Account | None = None) -> Request:
        ids = np.array(text, np.int64)
        made = new_request(
            next(self._rooms),
            ids,
            SamplingParams(max_tokens=4),
            account=account or Account(),
            life=Life("", now_s),
        )
        self.cache.tree.at(now_s)
        self.cache.sessions.arrived(made, now_s)
        return made

    def serve(self, text: range, now_s: float, tool: str = "", account: Account | None = None) -> Request:
        """Compute a text, and perhaps call a tool."""
        made = self.request(text, now_s, account)
        assert self.cache.admit(made)
        made.computed_len = made.num_tokens
        self.cache.retire(made)
        if tool:
            self.cache.sessions.called(made.room, tool, now_s)
        return made

    def pull(self, text: Sequence[int], caller: int) -> None:
        """Have all of a text that is not here come from a peer."""
        pages = PeerPages(self.cache)
        arriving = pages.expect(np.array(text, np.int64), b"", 0)
        assert arriving is not None
        pages.accept(arriving, len(text) // PAGE - arriving.first_page, caller)

    def num_found(self, text: range) -> int:
        return self.cache.tree.peek(np.array(text, np.int64))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert world.cache.audit(Holders()) == []


FIRST, SECOND, OTHERS = range(100, 124), range(200, 224), range(1000, 1064)  # 6, 6 and 16 pages


def test_what_a_session_has_is_evicted_last_while_it_is_away(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    world.serve(SECOND, 1.0)
    world.serve(range(1000, 1048), 2.0)
    assert (world.num_found(FIRST), world.num_found(SECOND)) == (24, 8)


def test_without_a_share_of_the_pool_the_longest_unused_goes() -> None:
    world = World(pin_share=0.0)
    world.serve(FIRST, 0.0, "shell")
    world.serve(SECOND, 1.0)
    world.serve(range(1000, 1048), 2.0)
    assert (world.num_found(FIRST), world.num_found(SECOND)) == (8, 24)


def test_nothing_is_refused_for_its_sake(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    assert world.cache.num_available == 20
    world.serve(range(1000, 1080), 1.0)  # all pages
    assert world.num_found(FIRST) == 0
    assert (len(world.cache.tree.pins), world.cache.report().pins_given_up) == (0, 1)


def test_it_is_kept_for_a_time_and_no_longer(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    assert world.cache.report().pinned_pages == 6
    world.cache.tree.at(2000.0)
    assert world.cache.report().pinned_pages == 0
    world.serve(SECOND, 2001.0)
    world.serve(range(1000, 1048), 2002.0)
    assert world.num_found(FIRST) < world.num_found(SECOND)


def test_a_session_that_comes_back_goes_on_with_its_job(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    back = world.request(range(100, 130), 7.0)
    assert back.job_s == 7.0
    assert world.cache.admit(back)
    assert (back.cached_len, back.pinned, len(world.cache.tree.pins)) == (24, None, 0)
    world.cache.retire(back)
    world.cache.sessions.called(back.room, "shell", 9.0)
    assert world.request(range(100, 132), 20.0).job_s == 20.0


def test_a_prompt_that_is_rewritten_at_its_end_is_the_same_session(world: World) -> None:
    world.serve(range(100, 164), 0.0, "shell")
    text = np.array([*range(100, 158), *range(7000, 7012)], np.int64)
    made = new_request(99, text, SamplingParams(), life=Life("", 5.0))
    world.cache.sessions.arrived(made, 5.0)
    assert made.job_s == 5.0


def test_another_text_is_another_job(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    assert world.request(range(110, 140), 5.0).job_s == 0.0


def test_a_text_that_was_evicted_meanwhile_is_known_again(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    world.cache.clear()
    back = world.request(range(100, 130), 7.0)
    assert (back.job_s, back.pinned) == (7.0, None)
    assert world.cache.sessions.counts.kept_returns == 0


def test_a_word_may_come_before_the_end_of_its_request(world: World) -> None:
    made = world.request(FIRST, 0.0)
    assert world.cache.admit(made)
    world.cache.sessions.called(made.room, "shell", 0.0)
    assert len(world.cache.tree.pins) == 0
    made.computed_len = made.num_tokens
    world.cache.retire(made)
    assert len(world.cache.tree.pins) == 1


def test_what_comes_of_its_own_text_is_kept_with_it_and_what_comes_of_another_that_begins_alike_is_not(
    world: World,
) -> None:
    session = world.serve(FIRST, 0.0, "shell")
    (away,) = world.cache.sessions._away.values()
    pins, end = world.cache.tree.pins, away.node
    for caller in (0, session.room + 1):
        world.pull([*FIRST, *range(50 + 8 * caller, 58 + 8 * caller)], caller)
        assert (list(pins._pins), pins.num_pages, away.node) == ([end], 6, end)
    world.pull([*FIRST, *range(8)], session.room)
    assert (away.node.end, list(pins._pins), pins.num_pages) == (8, [away.node], 8)


@pytest.mark.parametrize("times", [(10.0, 20.0), (20.0, 10.0)])
def test_a_text_that_two_sessions_have_is_kept_for_the_longer_time(world: World, times: tuple[float, float]) -> None:
    world.serve(range(100, 132), 0.0, "shell")
    session = world.serve(FIRST, 0.0, "shell")
    tree = world.cache.tree
    ends = [tree.end_of(np.array(text)) for text in (FIRST, range(100, 132))]
    for end, until_s in zip(ends, times, strict=True):
        tree.pin(end, Pin(ToolKey("", "shell"), 0.0, 0.0, until_s))
    world.cache.sessions.extended(ends[1], session.room)
    assert [(node, pin.until_s) for node, pin in tree.pins._pins.items()] == [(ends[1], 20.0)]


def test_a_text_stays_kept_for_another_session_that_ended_there(world: World) -> None:
    session = world.serve(FIRST, 0.0, "shell")
    (away,) = world.cache.sessions._away.values()
    end, other = away.node, world.request(FIRST[:16], 1.0)
    world.cache.sessions.ended(other, end, 1.0)
    world.cache.sessions.called(other.room, "shell", 1.0)
    world.pull([*FIRST, *range(8)], session.room)
    assert [*world.cache.tree.pins._pins] == [end, away.node]


def test_words_of_unknown_rooms_take_bounded_memory_and_do_nothing(world: World) -> None:
    for room in range(10 * MAX_EARLY):
        world.cache.sessions.called(room + (1 << 30), "shell", 0.0)
    assert len(world.cache.sessions._early) == MAX_EARLY
    assert world.cache.sessions.num_away == 0


def test_sessions_that_are_away_take_bounded_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_AWAY", 8)
    for number in range(12):
        world.serve(range(1000 * number, 1000 * number + 9), 0.01 * number, "shell")
    assert world.cache.sessions.num_away == 8


def test_of_more_jobs_than_fit_the_oldest_are_kept(world: World) -> None:
    jobs = [world.serve(range(1000 * number, 1000 * number + 16), float(number)) for number in range(4)]
    for job in jobs:
        world.cache.sessions.called(job.room, "shell", 4.0)
    kept = [world.num_found(range(1000 * number, 1000 * number + 16)) for number in range(4)]
    assert world.cache.report().pinned_pages == 8
    world.serve(range(9000, 9048), 4.5)  # 12 pages: 8 are left
    assert kept == [16] * 4
    assert [world.num_found(range(1000 * number, 1000 * number + 16)) for number in range(4)] == [16, 16, 0, 0]


def test_who_has_come_back_keeps_its_text_until_it_is_admitted_or_long_gone(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    back = world.request(range(100, 130), 7.0)
    assert back.pinned is not None
    world.cache.tree.at(7.0 + BACK_S - 1)
    assert len(world.cache.tree.pins) == 1
    world.cache.tree.at(7.0 + BACK_S + 1)
    assert len(world.cache.tree.pins) == 0
    assert world.cache.admit(back)  # the pin has gone before
    world.cache.drop(back)


def test_who_is_admitted_leaves_a_pin_that_another_has_put_in_place_of_his(world: World) -> None:
    world.serve(FIRST, 0.0, "shell")
    back = world.request(range(100, 130), 7.0)
    assert back.pinned is not None
    world.serve(FIRST, 8.0, "shell")  # another session of the same text
    world.cache.sessions.waits_no_more(back)
    assert len(world.cache.tree.pins) == 1


def test_requests_that_ended_take_no_memory_of_the_size_of_their_texts_when_these_are_gone(world: World) -> None:
    for number in range(8):
        world.serve(range(1000 * number, 1000 * number + 40), float(number))  # shortens the one before
    world.cache.clear()
    ended = [each.node for each in world.cache.sessions._ended.values()]
    assert len(ended) == 8
    assert [(node.tokens.size, node.tokens.base, node.hashes.size, node.hashes.base) for node in ended] == [
        (0, None, 0, None)
    ] * 8


@pytest.mark.parametrize("seed", range(5))
def test_books_are_right_whatever_comes(seed: int) -> None:
    """Random sessions and strangers; some words are lost, late or false. All pages can be had at any time."""
    rng = random.Random(seed)
    world = World(pin_share=rng.choice([0.2, 0.5, 1.0]))
    now_s = 0.0
    for _ in range(120):
        now_s += rng.expovariate(0.3)
        begin = 1000 * rng.randrange(8)
        tool = rng.choice(["", "shell", "build"])
        made = world.serve(range(begin, begin + rng.randrange(5, 40)), now_s, tool, Account(rng.choice("ab")))
        if rng.random() < 0.2:
            world.cache.sessions.called(made.room + rng.randrange(3), "shell", now_s)
        if rng.random() < 0.03:
            world.cache.clear()
        assert world.cache.num_available == 20
        assert world.cache.audit(Holders()) == []
        assert world.cache.tree.pins.num_pages <= world.cache.tree.pins.most_pages


def test_the_pin_of_who_waits_for_its_turn_lengthens_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request of the same text ends meanwhile, and its tool is soon back."""
    world.serve(FIRST, 0.0, "shell")
    back = world.request(FIRST, 1.0)
    monkeypatch.setattr(ReturnTimes, "ttl_s", lambda self, key, price: 2.0)
    world.serve(FIRST, 2.0, "shell")
    world.cache.sessions.waits_no_more(back)
    world.cache.tree.at(5.0)
    assert not world.cache.tree.pins
