from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from diptych.common.trust.gatekeeper import Strangers


def test_a_newcomer_takes_the_place_of_the_oldest_when_all_are_taken() -> None:
    strangers = Strangers(2)
    ended: list[int] = []
    with ExitStack() as stack:
        places = [stack.enter_context(strangers.place(partial(ended.append, number))) for number in range(3)]
        assert (ended, [place.is_lost for place in places]) == ([0], [True, False, False])
        stack.enter_context(strangers.place(partial(ended.append, 3)))
        assert ended == [0, 1]


def test_who_has_left_is_not_ended() -> None:
    strangers = Strangers(1)
    ended: list[int] = []
    for number in range(3):
        with strangers.place(partial(ended.append, number)):
            pass
    assert ended == []
