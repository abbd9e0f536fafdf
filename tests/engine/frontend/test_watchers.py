from __future__ import annotations

import pytest

from diptych.common.errors import Overloaded
from diptych.engine.frontend.watchers import MAX_STEPS, MAX_WATCHERS, RENEW_S, Watchers
from diptych.v1.worker_pb2 import LinkStatus, StepMark, StepRecords, WorkerNews, WorkerStatus


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchers(clock: Clock) -> Watchers:
    return Watchers(clock)


def steps(*numbers: int, joined: int = 0) -> StepRecords:
    """Steps with so many prompt tokens, of which a room joined in the last one."""
    count = len(numbers)
    marks = [StepMark(step=count - 1, room=joined)] if joined else []
    sizes = [1] * count
    return StepRecords(
        began_s=[1.0] * count,
        duration_s=[0.5] * count,
        prompt_tokens=numbers,
        output_tokens=sizes,
        requests=sizes,
        context_tokens=numbers,
        prompt_pairs=numbers,
        prompts=sizes,
        host_s=[0.25] * count,
        joined=marks,
    )


def news(rooms: int, told: StepRecords, links: tuple[int, ...] | None = None) -> WorkerNews:
    status = WorkerStatus(open_rooms=rooms, links=[LinkStatus(peer_instance_id=peer) for peer in links or ()])
    return WorkerNews(status=status, steps=told, has_links=links is not None)


def peers(told: WorkerNews) -> list[int]:
    return [link.peer_instance_id for link in told.status.links]


def test_every_watcher_is_told_the_same(watchers: Watchers) -> None:
    one, other = watchers.open(), watchers.open()
    assert not one.due.is_set()
    watchers.on_news(news(3, steps(10, 20), (7,)))
    told = watchers.pop(one)
    assert (told.status.open_rooms, list(told.steps.prompt_tokens), told.has_links, peers(told)) == (
        3,
        [10, 20],
        True,
        [7],
    )
    assert watchers.pop(other) == told
    assert not one.due.is_set()


def test_who_takes_late_gets_all_in_one_message_as_of_now(watchers: Watchers, clock: Clock) -> None:
    watcher = watchers.open()
    watchers.on_news(news(1, steps(10, joined=5), (7,)))
    clock.now_s = 2.0
    watchers.on_news(news(2, steps(20, 30, joined=6)))
    clock.now_s = 2.5
    told = watchers.pop(watcher)
    assert (told.status.open_rooms, list(told.steps.prompt_tokens), peers(told)) == (2, [10, 20, 30], [7])
    assert list(told.steps.began_s) == [3.5, 1.5, 1.5]
    assert list(told.steps.context_tokens) == list(told.steps.prompt_pairs) == [10, 20, 30]
    assert (list(told.steps.prompts), list(told.steps.host_s)) == ([1, 1, 1], [0.25] * 3)
    assert list(told.steps.joined) == [StepMark(step=0, room=5), StepMark(step=2, room=6)]


def test_links_are_told_when_they_are_news(watchers: Watchers) -> None:
    watcher = watchers.open()
    watchers.on_news(news(1, steps(), (7,)))
    first = watchers.pop(watcher)
    watchers.on_news(news(1, steps()))
    second = watchers.pop(watcher)
    watchers.on_news(news(1, steps(), ()))
    third = watchers.pop(watcher)
    assert [(told.has_links, peers(told)) for told in (first, second, third)] == [
        (True, [7]),
        (False, []),
        (True, []),
    ]


def test_nothing_is_told_before_all_is(watchers: Watchers) -> None:
    watcher = watchers.open()
    watchers.on_news(news(1, steps(10)))  # of a lease of somebody before
    assert not watcher.due.is_set()
    watchers.on_news(news(2, steps(20), ()))
    told = watchers.pop(watcher)
    assert (told.has_links, list(told.steps.prompt_tokens)) == (True, [20])


def test_a_slow_watcher_loses_the_oldest_steps_and_is_told_how_many(watchers: Watchers) -> None:
    slow = watchers.open()
    half = [1] * (MAX_STEPS // 2)
    for number in range(3):
        watchers.on_news(news(number, steps(*half[1:], 100 + number), ()))
    told = watchers.pop(slow)
    assert (len(told.steps.duration_s), told.steps.dropped) == (MAX_STEPS, MAX_STEPS // 2)
    assert [size for size in told.steps.prompt_tokens if size > 1] == [101, 102]
    watchers.on_news(news(4, steps(5)))
    again = watchers.pop(slow)
    assert (list(again.steps.prompt_tokens), again.steps.dropped) == ([5], 0)


def test_what_the_scheduler_dropped_is_told_on(watchers: Watchers) -> None:
    watcher = watchers.open()
    lossy = steps(1)
    lossy.dropped = 3
    watchers.on_news(news(1, lossy, ()))
    watchers.on_news(news(1, lossy))
    assert watchers.pop(watcher).steps.dropped == 6


def test_who_comes_later_hears_at_once_what_is_known_but_no_old_steps(watchers: Watchers) -> None:
    watchers.open()
    watchers.on_news(news(3, steps(10), (7,)))
    late = watchers.open()
    assert late.due.is_set()
    told = watchers.pop(late)
    assert (told.status.open_rooms, list(told.steps.prompt_tokens), peers(told)) == (3, [], [7])


def test_what_the_last_watcher_was_told_is_too_old_for_the_next(watchers: Watchers) -> None:
    watcher = watchers.open()
    watchers.on_news(news(3, steps(10), (7,)))
    watchers.close(watcher)
    watchers.on_news(news(4, steps(10), (7,)))  # the lease has not ended yet
    assert not watchers.open().due.is_set()


def test_the_scheduler_is_asked_once_for_all_watchers_and_at_once_for_the_first(
    watchers: Watchers, clock: Clock
) -> None:
    one = watchers.open()
    assert watchers.takes_lease()
    other = watchers.open()
    assert not watchers.takes_lease()
    clock.now_s = RENEW_S
    assert (watchers.takes_lease(), watchers.takes_lease()) == (True, False)
    watchers.close(one)
    watchers.close(other)
    watchers.open()
    assert watchers.takes_lease()


def test_there_are_so_many_watchers_at_most(watchers: Watchers) -> None:
    opened = [watchers.open() for _ in range(MAX_WATCHERS)]
    with pytest.raises(Overloaded):
        watchers.open()
    watchers.close(opened[0])
    watchers.open()
