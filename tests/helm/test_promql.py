"""The evaluator of queries that other tests use, by cases whose answers Prometheus' documentation gives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import promql
import pytest
from promql import NAME, Labels, Scrape, Value, evaluate


def series(name: str, **labels: str) -> Labels:
    return frozenset({NAME: name, **labels}.items())


def labels(**labels: str) -> Labels:
    return frozenset(labels.items())


def scrapes(*samples: Mapping[Labels, float]) -> list[Scrape]:
    return [Scrape(15.0 * number, each) for number, each in enumerate(samples)]


A, B = series("m", x="a"), series("m", x="b")
NOW = scrapes({A: 3.0, B: 5.0, series("n", x="a", y="c"): 2.0})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("m", {A: 3.0, B: 5.0}),
        ('m{x="a"}', {A: 3.0}),
        ('m{x!="a"}', {B: 5.0}),
        ('m{x=~"a|c"}', {A: 3.0}),
        ('m{x!~"a|c"}', {B: 5.0}),
        ('m{z=""}', {A: 3.0, B: 5.0}),
        ("m > 4", {B: 5.0}),
        ("m - 1", {labels(x="a"): 2.0, labels(x="b"): 4.0}),
        ("2 + 3 * 4 - 1", 13.0),
        ("(2 + 3) * 4", 20.0),
        ("sum(m)", {labels(): 8.0}),
        ("max by (x) (m)", {labels(x="a"): 3.0, labels(x="b"): 5.0}),
        ("min by (z) (m)", {labels(): 3.0}),
        ("count(m)", {labels(): 2.0}),
        ("m / on (x) n", {labels(x="a"): 1.5}),
        ("m / n", {}),
        ("m and on (x) n", {A: 3.0}),
        ("m unless on (x) n", {B: 5.0}),
        ("m or on (x) n", {A: 3.0, B: 5.0}),
        ("n or on (y) m", {series("n", x="a", y="c"): 2.0, A: 3.0, B: 5.0}),
        ('absent(m{x="a"})', {}),
        ('absent(m{x="c",y=~"."})', {labels(x="c"): 1.0}),
        ("vector(0)", {labels(): 0.0}),
        ("time()", 0.0),
        ("sum(nothing) > 0", {}),
    ],
)
def test_an_expression_has_a_value(expression: str, value: Value) -> None:
    assert evaluate(expression, NOW) == value


def test_nothing_by_nothing_is_not_a_number_and_something_is_infinite() -> None:
    found = evaluate("0 / 0", NOW)
    assert isinstance(found, float)
    assert math.isnan(found)
    assert evaluate("1 / 0", NOW) == math.inf


@pytest.mark.parametrize(
    ("counts", "increase"),
    [
        ((10, 10, 10, 10, 10), 0.0),
        ((100, 110, 120, 130, 140), 40.0),  # all of the range is covered
        ((100, 110, 5, 15, 25), 35.0),  # it began anew at 0
        ((None, None, 0, 10, 20), 20.0),  # it was not below zero
        ((None, None, 100, 110, 120), 25.0),  # and half of a step before the first
        ((None, None, None, None, 7), None),
    ],
)
def test_a_counter_has_grown_as_prometheus_guesses(counts: tuple[float | None, ...], increase: float | None) -> None:
    known = scrapes(*({A: float(count)} if count is not None else {} for count in counts))
    wanted = {} if increase is None else {labels(x="a"): increase}
    assert evaluate("increase(m[1m])", known) == pytest.approx(wanted)
    assert evaluate("rate(m[1m]) * 60", known) == pytest.approx(wanted)


def test_a_quantile_is_found_within_its_bucket() -> None:
    counts = {"0.1": 10.0, "0.5": 30.0, "1.0": 40.0, "+Inf": 40.0}
    known = scrapes({series("h_bucket", le=le): count for le, count in counts.items()})
    assert evaluate("histogram_quantile(0.5, sum by (le) (h_bucket))", known) == pytest.approx({labels(): 0.3})
    assert evaluate("histogram_quantile(1, h_bucket)", known) == {labels(): 1.0}


def test_a_series_that_is_not_in_the_last_scrape_has_ended() -> None:
    assert evaluate("m", scrapes({A: 1.0}, {})) == {}


@pytest.mark.parametrize(
    "expression",
    ["deriv(m[5m])", "sum without (x) (m)", "m offset 5m", "rate(m)", "sum(1)", "m{x}", "m )", "topk(1, m)", ""],
)
def test_what_is_not_known_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression, NOW)


def test_two_series_for_one_are_refused() -> None:
    with pytest.raises(ValueError, match="several series"):
        evaluate("n / on (z) m", NOW)


def test_an_expression_tells_what_it_asks_for() -> None:
    node = promql.parse('sum by (x) (rate(m{y="1"}[5m])) / on (z) n')
    assert [each.name for each in promql.selectors(node)] == ["m", "n"]
    assert set(promql.used_labels(node)) == {("m", "x"), ("m", "z"), ("n", "z")}
    assert promql.kept_labels(node) == {"z"}
