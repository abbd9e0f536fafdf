"""How far sources are believed."""

from __future__ import annotations

import random

import pytest

from diptych.engine.drafting.survival import MOST, RequestSurvival, Survival


def test_at_first_a_source_is_believed() -> None:
    assert Survival().of([0.9, 0.5, 0.2], 1.0) == [0.9, 0.5, 0.2]


def test_chances_are_chances_and_never_rise() -> None:
    survival = Survival()
    for _ in range(50):
        survival.learn([0.9, 0.1], 2)  # of what is said to be unlikely all comes true
    chances = survival.of([0.9, 0.1, 0.1], 4.0)
    assert chances == sorted(chances, reverse=True)
    assert max(chances) <= 1.0


@pytest.mark.parametrize(("said", "true"), [(0.9, 0.5), (0.3, 0.8), (0.6, 0.6), (0.95, 0.02)])
def test_what_is_said_is_corrected_to_what_comes_true(said: float, true: float) -> None:
    rng, survival = random.Random(2), Survival()
    for _ in range(2000):
        survival.learn([said], int(rng.random() < true))
    assert survival.of([said], 1.0)[0] == pytest.approx(true, abs=0.08)


def test_what_came_of_some_guesses_is_taken_to_be_true_of_others_until_they_are_known() -> None:
    survival = Survival()
    for _ in range(100):
        survival.learn([0.9], 0)
    assert survival.of([0.3], 1.0)[0] < 0.05
    for _ in range(100):
        survival.learn([0.3], 1)
    assert survival.of([0.3], 1.0)[0] > 0.8
    assert survival.of([0.9], 1.0)[0] < 0.2


def test_it_is_said_how_many_should_have_come() -> None:
    assert Survival().learn([0.5, 0.25], 0) == pytest.approx(0.75)


def test_a_request_is_believed_by_its_own_guesses() -> None:
    poor, rich = RequestSurvival(), RequestSurvival()
    for _ in range(40):
        poor.learn(2.0, 0)
        rich.learn(1.0, 4)
    assert poor.factor < 0.15
    assert 2.0 < rich.factor <= MOST


def test_a_request_that_changes_is_believed_anew() -> None:
    survival = RequestSurvival()
    for _ in range(60):
        survival.learn(2.0, 0)
    for _ in range(60):
        survival.learn(2.0, 2)
    assert survival.factor == pytest.approx(1.0, abs=0.1)
