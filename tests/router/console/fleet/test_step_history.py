from __future__ import annotations

import math

import pytest

from diptych.router.console.fleet.step_history import MAX_BYTES, MEMORY_S, STEPS_AT_ONCE, StepHistory, rows
from diptych.router.console.state import StepRate
from diptych.v1.worker_pb2 import StepMark, StepRecords

ONE, TWO = 0x11, 0x22
NAMES = {ONE: f"{ONE:016x}", TWO: f"{TWO:016x}"}


def steps(count: int, ago_s: float = 0.5) -> StepRecords:
    return StepRecords(
        began_s=[ago_s] * count,
        duration_s=[0.25] * count,
        prompt_tokens=range(count),
        output_tokens=[2] * count,
        requests=[3] * count,
    )


def test_steps_begin_by_the_clock_of_who_hears_of_them() -> None:
    told = StepRecords(
        began_s=[2.0, 1.5],
        duration_s=[0.5, 0.25],
        prompt_tokens=[100, 0],
        output_tokens=[1, 3],
        requests=[2, 3],
        handed=[StepMark(step=0, room=0xAB), StepMark(step=0, room=0xAC)],
        joined=[StepMark(step=1, room=0xAD)],
    )
    assert rows(told, 1000.0) == [
        (998_000.0, 500.0, 100, 1, 2, ["00000000000000ab", "00000000000000ac"], []),
        (998_500.0, 250.0, 0, 3, 3, [], ["00000000000000ad"]),
    ]


def test_a_message_whose_arrays_differ_costs_what_it_lacks() -> None:
    told = steps(3)
    del told.requests[1:]
    told.handed.add(step=99, room=5)
    assert len(rows(told, 1000.0)) == 1


@pytest.mark.parametrize("times", ["began_s", "duration_s"])
def test_a_message_with_times_that_are_no_numbers_is_not_kept(times: str) -> None:
    history, told = StepHistory(), steps(2)
    getattr(told, times)[1] = math.nan
    history.add(ONE, told, 1.0)
    assert history.since(0) == (0, {"workers": {}})


def test_reading_goes_on_where_it_ended() -> None:
    history = StepHistory()
    history.add(ONE, steps(1), 1.0)
    history.add(TWO, steps(2), 1.0)
    cursor, told = history.since(0)
    assert {name: len(each) for name, each in told["workers"].items()} == {NAMES[ONE]: 1, NAMES[TWO]: 2}
    assert history.since(cursor) == (cursor, {"workers": {}})
    history.add(ONE, steps(1), 2.0)
    cursor, told = history.since(cursor)
    assert told == {"workers": {NAMES[ONE]: [(1500.0, 250.0, 0, 2, 3, [], [])]}}
    assert StepHistory().since(0) == (0, {"workers": {}})


def test_a_long_past_is_read_in_parts() -> None:
    history, num_messages = StepHistory(), 7
    for number in range(num_messages):
        history.add(ONE, steps(STEPS_AT_ONCE // 2), float(number))
    cursor, sizes = 0, []
    while (found := history.since(cursor))[0] != cursor:
        cursor, told = found
        sizes.append(len(told["workers"][NAMES[ONE]]))
    assert sizes == [STEPS_AT_ONCE] * 3 + [STEPS_AT_ONCE // 2]


def test_what_is_older_than_some_minutes_is_forgotten() -> None:
    history = StepHistory()
    history.add(ONE, steps(1), 0.0)
    history.add(ONE, steps(2), 10.0)
    history.add(ONE, steps(4), MEMORY_S + 5.0)
    assert len(history.since(0)[1]["workers"][NAMES[ONE]]) == 6


def test_memory_is_bounded_and_a_reader_who_is_too_late_goes_on_with_what_is_left() -> None:
    history = StepHistory()
    for _ in range(3 * MAX_BYTES // (24 * 10_000)):
        history.add(ONE, steps(10_000), 0.0)
    assert history._num_bytes <= MAX_BYTES
    cursor, told = history.since(1)
    assert cursor > history._told[0].number >= 2
    assert len(told["workers"][NAMES[ONE]]) == 10_000


def test_a_rate_is_that_of_the_last_seconds() -> None:
    history = StepHistory()
    assert history.rate(ONE, 0.0) is None
    history.add(ONE, StepRecords(), 0.0)
    assert history.rate(ONE, 0.1) is None  # too soon
    for number in range(8):
        history.add(ONE, steps(2), 0.25 * (number + 1))
    expected = StepRate(steps_per_s=8.0, prompt_tokens_per_s=4, output_tokens_per_s=16, busy=1.0)
    assert history.rate(ONE, 2.0) == expected
    idle = StepRate(steps_per_s=0.0, prompt_tokens_per_s=0, output_tokens_per_s=0, busy=0.0)
    assert history.rate(ONE, 20.0) == idle


@pytest.mark.parametrize("interval_s", [0.25, 4.0, 8.0, 30.0])
@pytest.mark.parametrize("late", [0.0, 0.4])
def test_a_rate_is_right_however_seldom_a_worker_tells(interval_s: float, late: float) -> None:
    history = StepHistory()
    for number in range(40):
        history.add(ONE, steps(round(20 * interval_s)), number * interval_s)
    rate = history.rate(ONE, (39 + late) * interval_s)
    assert rate is not None
    assert rate["steps_per_s"] == 20.0


def test_the_first_word_tells_of_a_time_that_is_not_known() -> None:
    history = StepHistory()
    history.add(ONE, steps(1000), 0.0)
    assert history.rate(ONE, 4.0) is None


def test_who_is_not_watched_any_more_has_no_rate_but_its_steps_stay() -> None:
    history = StepHistory()
    history.add(ONE, steps(1), 0.0)
    history.forget(ONE)
    assert history.rate(ONE, 5.0) is None
    assert list(history.since(0)[1]["workers"]) == [NAMES[ONE]]


@pytest.mark.parametrize("busy_s", [0.1, 0.9])
def test_busy_is_the_share_of_time_in_steps(busy_s: float) -> None:
    history = StepHistory()
    history.add(ONE, StepRecords(), 0.0)
    for second in range(1, 6):
        one = StepRecords(began_s=[1.0], duration_s=[busy_s], prompt_tokens=[0], output_tokens=[1], requests=[1])
        history.add(ONE, one, float(second))
    rate = history.rate(ONE, 5.0)
    assert rate is not None
    assert rate["busy"] == pytest.approx(busy_s)
