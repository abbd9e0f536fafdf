from __future__ import annotations

import numpy as np

from diptych.engine.deadlines import Deadlines
from diptych.engine.request import Request, new_request
from diptych.engine.sampling_params import SamplingParams


def request(room: int, deadline_s: float | None) -> Request:
    return new_request(room, np.arange(3), SamplingParams(), deadline_s=deadline_s)


def test_each_is_due_once_the_earliest_first() -> None:
    deadlines = Deadlines()
    for room, deadline_s in ((1, 5.0), (2, 3.0), (3, None), (4, 9.0), (5, 3.0)):
        deadlines.add(request(room, deadline_s))
    assert deadlines.due(2.9) == []
    assert deadlines.next_s() == 3.0
    assert [due.room for due in deadlines.due(5.0)] == [2, 5, 1]
    assert deadlines.due(5.0) == []
    assert deadlines.next_s() == 9.0


def test_what_has_ended_is_never_due() -> None:
    deadlines = Deadlines()
    first, second = request(1, 1.0), request(2, 2.0)
    deadlines.add(first)
    deadlines.add(second)
    first.has_ended = True
    assert deadlines.due(0.0) == []
    assert deadlines.next_s() == 2.0
    second.has_ended = True
    assert deadlines.due(9.0) == []
    assert deadlines.next_s() is None
