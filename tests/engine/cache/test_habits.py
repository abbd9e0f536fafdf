"""How often a tenant's requests call tools."""

from __future__ import annotations

import pytest

from diptych.engine.cache.habits import MAX_TENANTS, MEMORY, Habits


def test_who_never_called_a_tool_has_no_sessions() -> None:
    habits = Habits()
    assert habits.share("a") == 0.0
    habits.ended("a")
    assert habits.share("a") == 0.0


def test_the_share_is_that_of_the_tenants_own_requests() -> None:
    habits = Habits()
    for number in range(8):
        habits.ended("a")
        habits.ended("b")
        if number % 4:
            habits.called("a")
    assert habits.share("a") == pytest.approx(0.75)
    assert habits.share("b") == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    habits = Habits()
    for _ in range(MEMORY):
        habits.ended("a")
        habits.called("a")
    for _ in range(3 * MEMORY):
        habits.ended("a")
    assert 0.0 < habits.share("a") < 0.06


def test_tenants_take_bounded_memory_and_the_one_that_ended_nothing_for_longest_goes() -> None:
    habits = Habits()
    for number in range(MAX_TENANTS):
        habits.ended(str(number))
        habits.called(str(number))
    habits.ended("0")
    habits.ended("new")
    assert len(habits) == MAX_TENANTS
    assert (habits.share("0") > 0, habits.share("1"), habits.share("2") > 0) == (True, 0.0, True)


def test_a_word_of_an_unknown_tenant_teaches_nothing() -> None:
    habits = Habits()
    habits.called("a")
    assert (len(habits), habits.share("a")) == (0, 0.0)
