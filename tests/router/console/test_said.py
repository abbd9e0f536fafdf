from __future__ import annotations

import pytest

from diptych.router.console.said import AGAIN_S, Said

ONE, OTHER = {"a": 1}, {"b": 2}


def asked_at(said: Said, present: set[int], until_s: float) -> list[float]:
    """Return when router 1, which never answers, is asked."""
    at_s = []
    for tenth in range(round(10 * until_s)):
        if asked := said.whom(present, tenth / 10):
            said.note(asked, {}, tenth / 10)
            said.due_s = until_s
            at_s.append(tenth / 10)
    return at_s


def test_who_never_answers_is_asked_after_twice_as_long_each_time() -> None:
    assert asked_at(Said(), {1}, 20.0) == pytest.approx([0.0, 0.9, 2.7, 6.3, 13.5], abs=0.3)


def test_the_first_miss_takes_nothing_away_and_the_second_takes_what_was_said() -> None:
    said = Said()
    said.note({1, 2}, {1: ONE, 2: OTHER}, 0.0)
    said.note({1, 2}, {2: OTHER}, 10.0)
    assert [*said.answers] == [ONE, OTHER]
    said.note({1}, {}, 11.0)
    assert [*said.answers] == [OTHER]


def test_an_answer_ends_a_silence() -> None:
    said = Said()
    for answers in ({1: ONE}, {}, {1: OTHER}, {}):
        said.note({1}, answers, 0.0)
    assert [*said.answers] == [OTHER]


def test_who_was_not_asked_is_not_silent() -> None:
    said = Said()
    said.note({1, 2}, {1: ONE}, 0.0)
    said.due_s = 100.0
    assert said.whom({1, 2}, AGAIN_S / 2) == set()
    assert said.whom({1, 2}, AGAIN_S) == {2}
    said.note({2}, {2: OTHER}, AGAIN_S)
    assert (said.answers, said.whom({1, 2}, 99.0)) == ((ONE, OTHER), set())
    assert said.whom({1, 2}, 100.0) == {1, 2}


def test_who_has_gone_is_forgotten_with_what_it_said() -> None:
    said = Said()
    said.note({1, 2}, {1: ONE}, 0.0)
    said.due_s = 100.0
    assert (said.whom({3}, 50.0), said.answers) == (set(), ())
    assert said.whom({2}, 50.0) == set()  # it came back: it is asked with all
