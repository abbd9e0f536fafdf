from __future__ import annotations

from array import array
from typing import Any
from urllib.parse import parse_qsl

import pytest

from diptych.common.errors import InvalidRequest
from diptych.router.console.calls.call_facts import CallFacts
from diptych.router.console.calls.request_rows import ALL, MAX_ROWS, RowFilter, list_of, merged, newest, row_of
from diptych.router.console.state import RequestRow
from diptych.router.values.output import Usage

NOW_S = 20.0


def call(**fields: Any) -> CallFacts:
    defaults: dict[str, Any] = {
        "request_id": "mine",
        "path": "/v1/completions",
        "tenant": "acme",
        "model": "tiny",
        "adapter": "",
        "begun_s": 10.0,
        "begun_unix_s": 1e9,
        "ended_s": 14.0,
        "answered_s": 11.8,
        "status": 200,
        "outcome": "ok",
        "marks": (),
        "writes": (),
        "outputs": (),
        "num_attempts": 0,
        "usage": Usage(20, 5, 4),
        "token_s": array("d"),
        "trace_id": "",
    }
    return CallFacts(**{**defaults, **fields})


def row(request_id: str = "mine", arrived_unix_s: float = 1e9, **fields: Any) -> RequestRow:
    return row_of(call(request_id=request_id, begun_unix_s=arrived_unix_s, **fields), "0" * 16, NOW_S)


def test_a_row_says_what_a_call_is_and_how_far_it_has_come() -> None:
    assert row() == {
        "id": "mine",
        "router": "0" * 16,
        "phase": "ended",
        "outcome": "ok",
        "status": 200,
        "path": "/v1/completions",
        "tenant": "acme",
        "model": "tiny",
        "adapter": "",
        "arrived_unix_s": 1e9,
        "duration_s": 4.0,
        "ttft_s": None,
        "prompt_tokens": 20,
        "cached_tokens": 4,
        "output_tokens": 5,
        "num_attempts": 0,
        "prefill": "",
        "decode": "",
    }


def test_a_call_that_runs_has_taken_as_long_as_it_runs() -> None:
    waiting = row(ended_s=None, outcome="", usage=Usage(0, 0, 0))
    assert (waiting["phase"], waiting["duration_s"]) == ("waiting", 10.0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, True),
        ({"phase": "ended"}, True),
        ({"phase": "output"}, False),
        ({"tenant": "acme"}, True),
        ({"tenant": "acm"}, False),
        ({"model": "tiny", "outcome": "ok"}, True),
        ({"model": "tiny", "outcome": "error"}, False),
        ({"adapter": "law"}, False),
        ({"slow_s": "4"}, True),
        ({"slow_s": "4.01"}, False),
    ],
)
def test_every_field_of_a_filter_must_fit(query: dict[str, str], expected: bool) -> None:
    assert RowFilter.of_query(query).accepts(row()) is expected


@pytest.mark.parametrize(
    "query",
    [
        {"phase": "over"},
        {"slow_s": "-1"},
        {"slow_s": "nan"},
        {"slow_s": "soon"},
        {"limit": "0"},
        {"limit": "-1"},
        {"limit": f"{MAX_ROWS + 1}"},
        {"limit": "1" * 30},
        {"limit": "٣"},
    ],
)
def test_a_filter_that_can_not_be_is_refused_with_its_name(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        RowFilter.of_query(query)
    assert error.value.param in query


def test_a_filter_survives_the_way_to_another_router() -> None:
    asked = RowFilter("output", "a&b", "m/1", "law", "", 0.25, 7)
    assert RowFilter.of_query(dict(parse_qsl(asked.query(), keep_blank_values=True))) == asked
    assert RowFilter.of_query(dict(parse_qsl(ALL.query(), keep_blank_values=True))) == ALL


def test_the_newest_are_kept_and_what_runs_before_what_ended() -> None:
    running = row("long", 1.0, ended_s=None, outcome="")
    found = newest([row("old", 2.0), row("new", 4.0), running, row("newer", 5.0)], 3)
    assert list(found["rows"]) == ["newer", "new", "long"]


def test_lists_of_routers_become_one_that_is_bounded() -> None:
    one, other = newest([row("a", 1.0), row("c", 3.0)], 9), newest([row("b", 2.0), row("d", 4.0)], 9)
    assert list(merged([one, other], 3)["rows"]) == ["d", "c", "b"]


@pytest.mark.parametrize("answer", [{}, {"rows": []}, {"rows": {"a": {"id": "a"}}}, {"rows": {"a": 1}}])
def test_what_a_router_of_another_version_says_otherwise_is_left_out(answer: dict[str, Any]) -> None:
    assert list_of(answer) == {"rows": {}}


def test_what_another_router_says_is_taken_as_it_is() -> None:
    assert list_of({"rows": {"mine": {**row()}}}) == {"rows": {"mine": row()}}
