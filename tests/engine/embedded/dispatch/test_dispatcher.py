from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.embedded.dispatch.dispatcher import Dispatcher
from diptych.engine.embedded.dispatch.policy import GroupView, RequestView
from diptych.engine.embedded.dispatch.round_robin import RoundRobin

PROMPT = RequestView([1, 2, 3])


class Watching:
    """Round robin that remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Sequence[GroupView]] = []
        self._policy = RoundRobin()

    def choose(self, groups: Sequence[GroupView], request: RequestView) -> int:
        self.shown.append(groups)
        return self._policy.choose(groups, request)


def test_a_room_stays_with_its_group_until_its_last_output() -> None:
    dispatcher = Dispatcher(2, RoundRobin())
    assert [dispatcher.start(room, PROMPT) for room in (10, 11, 12)] == [0, 1, 0]
    dispatcher.answered(11, is_last=False)
    assert [dispatcher.rank_of(room) for room in (10, 11, 12)] == [0, 1, 0]
    dispatcher.answered(11, is_last=True)
    dispatcher.answered(11, is_last=True)
    assert dispatcher.rank_of(11) is None


def test_a_policy_sees_what_waits_and_what_is_open() -> None:
    policy = Watching()
    dispatcher = Dispatcher(2, policy)
    for room in (10, 11, 12):
        dispatcher.start(room, PROMPT)
    dispatcher.answered(10, is_last=False)
    dispatcher.answered(11, is_last=True)
    dispatcher.start(13, PROMPT)
    assert policy.shown[-1] == [GroupView(0, 2, 3), GroupView(1, 0, 0)]


def test_a_lost_group_gives_up_its_rooms_and_gets_no_more() -> None:
    dispatcher = Dispatcher(2, RoundRobin())
    for room in (10, 11, 12):
        dispatcher.start(room, PROMPT)
    assert dispatcher.lose(0) == [10, 12]
    assert (dispatcher.ranks, dispatcher.rank_of(10)) == ((1,), None)
    assert [dispatcher.start(room, PROMPT) for room in (13, 14)] == [1, 1]
