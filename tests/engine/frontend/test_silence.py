"""How long a step loop has been silent, by its beats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import pytest

from diptych.engine.frontend.silence import MEMORY_S, Silence

LOOK_S = 0.5


def looks(silence: Silence, beats_s: Iterable[float], until_s: float, since_s: float = 0.0) -> list[float]:
    """What each look finds, of a loop that beats at these moments, in order of time."""
    found, at_s, times_s = [], since_s, sorted(beats_s)
    while at_s <= until_s:
        num_beats = bisect_right(times_s, at_s)
        found.append(silence.look(times_s[num_beats - 1] if num_beats else None, at_s))
        at_s += LOOK_S
    return found


def idle(begin_s: float, end_s: float) -> list[float]:
    return [begin_s + 0.45 * number for number in range(int((end_s - begin_s) / 0.45) + 1)]


def test_a_loop_that_has_not_begun_is_not_silent() -> None:
    assert Silence().look(None, 1000.0) == 0.0


def test_a_loop_that_beats_is_never_silent() -> None:
    assert set(looks(Silence(), idle(0.0, 60.0), 60.0)) == {0.0}


def test_a_loop_that_stops_is_silent_after_two_seconds_until_it_beats() -> None:
    silence = Silence()
    assert looks(silence, [*idle(0.0, 9.0), 14.0], 15.0)[22:] == pytest.approx([0, 2.5, 3, 3.5, 4, 4.5, 0, 0, 0])


@pytest.mark.parametrize("step_s", [3.0, 7.5])
def test_a_step_as_long_as_one_before_is_no_silence_and_one_of_more_than_twice_that_is(step_s: float) -> None:
    silence = Silence()
    first = looks(silence, [0.0, step_s], step_s)
    assert max(first) == pytest.approx(step_s - LOOK_S, abs=LOOK_S)  # nobody knew that steps take so long
    again = looks(silence, [step_s, 2 * step_s, 3 * step_s], 3 * step_s, since_s=step_s)
    assert set(again) == {0.0}
    longest = looks(silence, [3 * step_s], 5.5 * step_s, since_s=3 * step_s)
    assert longest[int(1.5 * step_s / LOOK_S)] == 0.0
    assert longest[-1] == pytest.approx(2.5 * step_s, abs=LOOK_S)


@pytest.mark.parametrize("hours", [0.9, 2.1])
def test_a_long_round_counts_for_an_hour_and_for_two_at_most(hours: float) -> None:
    silence = Silence()
    looks(silence, [0.0, 30.0], 30.0)  # a pause of the machine, say
    later_s = 30.0 + hours * MEMORY_S
    looks(silence, idle(30.0, later_s), later_s, since_s=30.0)
    assert (silence.look(later_s, later_s + 3.0) == 0.0) == (hours < 1)


def test_long_steps_that_come_each_half_hour_are_called_silence_the_first_time_only() -> None:
    silence, found = Silence(), list[bool]()
    for begin_s in range(0, 4 * 3600, 1800):
        beats = [*idle(begin_s, begin_s + 1784.0), *(begin_s + 1784.0 + 4.0 * step for step in range(1, 4))]
        found.append(max(looks(silence, beats, begin_s + 1799.0, since_s=begin_s)) > 0)
    assert found == [True, *[False] * 7]
