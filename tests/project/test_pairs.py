"""Which cases of a product are run where each pair of values is enough."""

from __future__ import annotations

from itertools import combinations, product

from pairs import covering


def test_each_pair_of_values_is_shown_by_far_fewer_cases_than_there_are() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product("12", "123", "1234")]
    chosen = [cases[at] for at in covering(cases)]
    assert 12 <= len(chosen) <= 14
    assert {pair for case in chosen for pair in combinations(case.items(), 2)} == {
        pair for case in cases for pair in combinations(case.items(), 2)
    }


def test_every_value_of_a_parameter_alone_and_every_row_of_two_is_shown() -> None:
    assert covering([{"a": each} for each in "1231"]) == [0, 1, 2]
    assert covering([{"a": a, "b": b} for a, b in product("12", "34")]) == [0, 1, 2, 3]
    assert covering([]) == []


def test_each_value_alone_is_shown_by_as_many_cases_as_a_parameter_has_values() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product("12", "123", "1234")]
    chosen = [cases[at] for at in covering(cases, num_together=1)]
    assert len(chosen) == 4
    assert {value for case in chosen for value in case.items()} == {value for case in cases for value in case.items()}
