from __future__ import annotations

import numpy as np
from flat_request import flat_request

from diptych.engine.schedule.deadlines import MIN_COMPACTED, Deadlines
from diptych.engine.values.request import Request
from diptych.generation.sampling_params import SamplingParams


def request(room: int, deadline_s: float | None) -> Request:
    return flat_request(room, np.arange(3), SamplingParams(), deadline_s=deadline_s)


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


def test_what_has_ended_long_before_its_deadline_is_not_kept() -> None:
    deadlines, open_requests = Deadlines(), [request(room, 1000.0) for room in range(10)]
    for made in open_requests:
        deadlines.add(made)
    for room in range(10, 5000):
        ended = request(room, 600.0 + room)
        deadlines.add(ended)
        ended.has_ended = True
    assert len(deadlines) <= MIN_COMPACTED
    assert deadlines.due(1000.0) == open_requests
