"""Calls by a clock of the test's: which are followed, and how much is kept of them."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import pytest

from diptych.router.choose.explain import AttemptRecord, Explanations, Selection
from diptych.router.choose.policies import plan_of
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.console.calls import calls as calls_module
from diptych.router.console.calls.call_facts import MAX_WORDS, facts_of, routing_facts_of
from diptych.router.console.calls.calls import FOLLOWED_S, MAX_ENDED, MAX_ENDED_BYTES, Calls
from diptych.router.console.calls.request_rows import RowFilter
from diptych.router.console.pieces import at_once
from diptych.router.tracing.record import (
    MAX_MARKS,
    MAX_OUTPUTS,
    MAX_TOKEN_TIMES,
    MAX_WRITES,
    AttemptTrace,
    CallTrace,
    EntryPoint,
    OutputTrace,
    Stage,
)
from diptych.router.workers.worker_view import Pair, WorkerLoad

EDGE = EntryPoint("POST /v1/completions", {}, "http.response.status_code", "/v1/completions")


class Recent:
    """Who follows calls."""

    def __init__(self) -> None:
        self.running: list[CallTrace] = []
        self.until_s = 0.0

    def hand_to(self, taker: Calls) -> None: ...

    def follow_until(self, at_s: float) -> None:
        self.until_s = at_s

    def calls(self) -> list[CallTrace]:
        return self.running


def make_calls(recent: Recent, explanations: Explanations | None = None) -> Calls:
    return Calls(recent, explanations or Explanations(100), 7, lambda: 20.0, lambda: 1020.0)


def trace(request_id: str, begun_s: float = 10.0, **fields: Any) -> CallTrace:
    call = CallTrace(EDGE, begun_s, round(begun_s * 1e9), {}, lambda: 20.0, **fields)
    call.note_origin(request_id, "acme")
    return call


def ended(request_id: str, begun_s: float = 10.0, **fields: Any) -> CallTrace:
    return trace(request_id, begun_s, **{"ended_s": begun_s + 1, "outcome": "ok", "status": 200, **fields})


def attempt(**fields: Any) -> AttemptRecord:
    pair = Pair(1, 2)
    workers = {each: Worker(each, WorkerLoad(0, 0, 1000)) for each in (pair.prefill_id, pair.decode_id)}
    candidates = Candidates(workers, {pair.prefill_id: (pair.decode_id,)})
    selection = Selection(plan_of("least_load"), candidates, RequestView(prompt_len=20, number=0), pair)
    return AttemptRecord(selection, 7, **{"begun_s": 10.0, **fields})


def rows(calls: Calls, **fields: Any) -> dict[str, Any]:
    return {key: row["phase"] for key, row in at_once(calls.requests(RowFilter(**fields)))["rows"].items()}


def test_a_look_has_calls_followed_for_some_minutes() -> None:
    recent = Recent()
    make_calls(recent).want(100.0)
    assert recent.until_s == 100.0 + FOLLOWED_S


def test_a_call_is_listed_while_it_runs_and_after_it_ended() -> None:
    recent = Recent()
    calls = make_calls(recent)
    recent.running = [running := trace("runs")]
    calls.add(ended("over", 9.0))
    assert rows(calls) == {"runs": "waiting", "over": "ended"}
    assert rows(calls, phase="ended") == {"over": "ended"}
    running.ended_s, running.outcome = 12.0, "ok"
    assert rows(calls)["runs"] == "ended"
    story = at_once(calls.story("runs"))
    assert story is not None
    assert story["row"]["tenant"] == "acme"
    assert at_once(calls.story("never")) is None


def test_the_newest_calls_are_the_same_object_while_nothing_happens() -> None:
    recent, explanations = Recent(), Explanations(100)
    calls = make_calls(recent, explanations)
    calls.add(ended("followed"))
    first = at_once(calls.newest())
    assert at_once(calls.newest()) is first
    record = explanations.begin("routed", 11.0)
    assert at_once(calls.newest())["rows"]["routed"]["phase"] == "waiting"
    record.is_over = True
    assert at_once(calls.newest())["rows"]["routed"]["phase"] == "ended"
    assert at_once(calls.newest()) is at_once(calls.newest())
    recent.running = [trace("runs")]
    assert at_once(calls.newest())["rows"].keys() == {"runs", "routed", "followed"}
    recent.running = []
    assert at_once(calls.newest())["rows"].keys() == {"routed", "followed"}


def test_of_calls_with_one_id_the_last_counts() -> None:
    calls = make_calls(Recent())
    calls.add(ended("same", 1.0))
    calls.add(ended("same", 5.0))
    (row,) = at_once(calls.requests())["rows"].values()
    assert row["arrived_unix_s"] == 5.0
    story = at_once(calls.story("same"))
    assert story is not None
    assert story["row"]["arrived_unix_s"] == 5.0


def test_a_call_whose_id_is_not_known_yet_is_not_listed() -> None:
    recent = Recent()
    recent.running = [CallTrace(EDGE, 10.0, 0, {}, lambda: 20.0)]
    assert rows(make_calls(recent)) == {}


@pytest.mark.parametrize(
    ("attempts", "is_over", "phase", "outcome"),
    [
        ([], False, "waiting", ""),
        ([], True, "ended", "unavailable"),
        ([attempt()], False, "prompt", ""),
        ([attempt(first_token_s=11.0)], False, "output", ""),
        ([attempt(first_token_s=11.0, ended_s=12.0, outcome="stop")], True, "ended", "ok"),
        ([attempt(first_token_s=11.0, ended_s=12.0, outcome="closed")], True, "ended", "closed"),
        ([attempt(ended_s=12.0, outcome="failed: decode leg: INTERNAL")], True, "ended", "error"),
        ([attempt(ended_s=12.0, outcome="failed: decode leg: INTERNAL")], False, "prompt", ""),
    ],
)
def test_of_a_call_that_nobody_followed_is_told_what_routing_knows(
    attempts: list[AttemptRecord], is_over: bool, phase: str, outcome: str
) -> None:
    explanations = Explanations(10)
    record = explanations.begin("routed", 9.0)
    record.attempts, record.is_over = attempts, is_over
    calls = make_calls(Recent(), explanations)
    for _ in range(2):  # it is kept when it has ended, and stays the same
        row = at_once(calls.requests())["rows"]["routed"]
        assert (row["phase"], row["outcome"], row["arrived_unix_s"]) == (phase, outcome, 1009.0)
        assert (row["path"], row["tenant"], row["status"]) == ("", "", None)
    story = at_once(calls.story("routed"))
    assert story is not None
    assert story["explanation"] is not None


def test_several_outputs_of_a_call_that_nobody_followed_are_one_row() -> None:
    explanations = Explanations(10)
    for number in range(3):
        record = explanations.begin("several", 9.0)
        record.attempts = [attempt(ended_s=12.0 + number, outcome="stop")]
        record.is_over = number < 2
    calls = make_calls(Recent(), explanations)
    row = at_once(calls.requests())["rows"]["several"]
    assert (row["phase"], row["num_attempts"]) == ("prompt", 3)
    record.is_over = True
    row = at_once(calls.requests())["rows"]["several"]
    assert (row["phase"], row["duration_s"]) == ("ended", 5.0)


def routed(explanations: Explanations, count: int) -> None:
    """Calls that nobody follows, the newest last."""
    for number in range(count):
        record = explanations.begin(f"{number}", float(number))
        record.attempts = [attempt(ended_s=number + 1.0 + (number == 0), outcome="stop")]
        record.is_over = True


def test_of_calls_that_nobody_followed_as_much_is_made_as_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noting(records: Any, wall_s: float) -> Any:
        made.append(records[0].request_id)
        return routing_facts_of(records, wall_s)

    monkeypatch.setattr(calls_module, "routing_facts_of", noting)
    routed(explanations := Explanations(100), 50)
    calls = make_calls(Recent(), explanations)
    assert [*rows(calls, limit=2)] == ["49", "48"] == made[::-1]
    assert [*rows(calls, limit=3)] == ["49", "48", "47"]
    assert len(made) <= 5
    assert at_once(calls.story("7")) is not None
    assert len(made) <= 6
    assert [*rows(calls, outcome="ok", limit=50)] == [f"{49 - number}" for number in range(50)]
    assert [*rows(calls, slow_s=1.5)] == ["0"]


def test_what_was_made_later_is_not_newer() -> None:
    routed(explanations := Explanations(100), 20)
    calls = make_calls(Recent(), explanations)
    assert len(rows(calls, limit=1)) == 1
    calls.add(ended("followed", 17.5))
    assert len(rows(calls, outcome="ok", limit=100)) == 21  # all are made
    assert rows(calls, limit=4).keys() == {"19", "18", "followed", "17"}


def test_what_is_kept_is_bounded_by_number() -> None:
    calls = make_calls(Recent())
    for number in range(MAX_ENDED + 50):
        calls.add(ended(f"{number}"))
    assert rows(calls, limit=1000).keys() == {f"{number}" for number in range(MAX_ENDED - 950, MAX_ENDED + 50)}
    assert at_once(calls.story("49")) is None
    assert at_once(calls.story("50")) is not None


def long_call(number: int) -> CallTrace:
    """A call with as much of everything as may be noted, and more."""
    output = OutputTrace([AttemptTrace(10.0, attempt(outcome="failed: " + "x" * 9 * MAX_WORDS), {}) for _ in range(50)])
    call = ended(
        f"{number:0128}",
        outputs=[output] * 2 * MAX_OUTPUTS,
        token_s=array("d", [10.5] * MAX_TOKEN_TIMES),
        writes=[Stage("write", 10.1 + i, 10.2 + i) for i in range(MAX_WRITES)],
        tenant="t" * 256,
        model=f"m{number}" * 100,
    )
    for mark in range(2 * MAX_MARKS):
        call.mark(f"{mark % 2}")
    return call


@pytest.mark.parametrize("make", [long_call, lambda number: ended(f"{number}")], ids=["long", "short"])
def test_what_is_kept_is_bounded_in_bytes_with_its_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = MAX_ENDED_BYTES // 8
    monkeypatch.setattr(calls_module, "MAX_ENDED_BYTES", bound)
    calls = make_calls(Recent())
    for number in range(2):  # what is made once
        calls.add(make(number))
        at_once(calls.requests())
    tracemalloc.start()
    try:
        for number in range(2 * bound // facts_of(make(0)).nbytes):
            calls.add(make(number))
            if number % 10 == 0:
                at_once(calls.requests(RowFilter(limit=1000)))
        at_once(calls.requests(RowFilter(limit=1000)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert calls.ended_bytes <= bound
    assert taken <= bound
    assert taken >= bound / 20  # it is kept at all


def test_marks_of_one_name_are_one_and_there_are_not_many() -> None:
    call = trace("marks")
    call.mark("a")
    call.mark("a")
    assert [name for name, _ in call.marks] == ["a"]
    for number in range(2 * MAX_MARKS):
        call.mark(f"{number}")
    assert len(call.marks) == MAX_MARKS
    assert call.marks[-1][0] == f"{2 * MAX_MARKS - 1}"


def test_the_first_tokens_have_their_times() -> None:
    call = trace("tokens")
    for at_s in (11.0, 12.0):
        call.note_tokens(300, at_s)
    assert call.num_tokens == 600
    assert call.token_s.tolist() == [11.0] * 300 + [12.0] * (MAX_TOKEN_TIMES - 300)


def test_there_are_not_many_writes() -> None:
    call = trace("writes")
    for number in range(2 * MAX_WRITES):
        call.note_write(11.0 + number, 0.5)
    assert len(call.writes) == MAX_WRITES
    assert call.writes[0] == Stage("write", 11.0, 11.5)
