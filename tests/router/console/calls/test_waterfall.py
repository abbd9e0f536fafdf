"""Tables of what is known of a call against the bars that are made of it. A call begins at 10 s."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from diptych.common.members.roles import LegKind
from diptych.router.console.calls.call_facts import AttemptFacts, CallFacts, LegTimes
from diptych.router.console.calls.waterfall import bars_of, unnamed_s
from diptych.router.console.state import Bar
from diptych.router.tracing.record import Stage
from diptych.router.values.output import Usage

NOW_S = 20.0
P, D, D2 = 1, 2, 3
PREFILL = LegTimes(queue_us=100_000, compute_us=500_000, transfer_us=300_000, verify_us=0, join_us=0)
DECODE = LegTimes(queue_us=200_000, compute_us=0, transfer_us=500_000, verify_us=100_000, join_us=200_000)
LEGS = {LegKind.PREFILL: PREFILL, LegKind.DECODE: DECODE}
MARKS = (
    ("read", 10.1),
    ("parse", 10.15),
    ("check", 10.2),
    ("admit", 10.4),
    ("render", 10.5),
    ("tokenize", 10.6),
    ("prepare", 10.65),
)


def attempt(begun_s: float = 11.0, decode: int = D, **fields: Any) -> AttemptFacts:
    """One that a pair was asked for 0.2 s before; its first token came after 0.7 s, its end after 3 s."""
    defaults: dict[str, Any] = {
        "asked_s": begun_s - 0.2,
        "begun_s": begun_s,
        "first_token_s": begun_s + 0.7,
        "ended_s": begun_s + 3,
        "outcome": "stop",
        "prefill_id": P,
        "decode_id": decode,
        "prompt_tokens": 20,
        "legs": LEGS,
    }
    found = {**defaults, **fields}
    legs = found.pop("legs")
    prompt = legs.get(LegKind.PREFILL, legs.get(LegKind.LOCAL))
    return AttemptFacts(**found, prompt=prompt, decode=legs.get(LegKind.DECODE))


def failed(begun_s: float = 11.0, **fields: Any) -> AttemptFacts:
    """One that failed after half a second, and told nothing."""
    defaults: dict[str, Any] = {"first_token_s": None, "ended_s": begun_s + 0.5, "outcome": "failed: ...", "legs": {}}
    return attempt(begun_s, **{**defaults, **fields})


def call(*outputs: list[AttemptFacts], **fields: Any) -> CallFacts:
    defaults: dict[str, Any] = {
        "request_id": "mine",
        "path": "/v1/completions",
        "tenant": "",
        "model": "tiny",
        "adapter": "",
        "begun_s": 10.0,
        "begun_unix_s": 1e9,
        "ended_s": 14.5,
        "answered_s": 11.8,
        "status": 200,
        "outcome": "ok",
        "marks": MARKS,
        "writes": (),
        "outputs": outputs,
        "num_attempts": sum(map(len, outputs)),
        "usage": Usage(20, 5, 0),
        "token_s": array("d"),
        "trace_id": "",
    }
    return CallFacts(**{**defaults, **fields})


def told(made: CallFacts) -> list[Bar]:
    """The bars, which must be whole: each begins where the one before it ends, and so do the parts of an attempt."""
    bars = bars_of(made, NOW_S)
    check_line(bars, 0.0)
    end_s = NOW_S if made.ended_s is None else made.ended_s
    named_s = sum(bar["duration_s"] for bar in bars)
    assert named_s + unnamed_s(made, NOW_S) == pytest.approx(end_s - made.begun_s)
    for bar in bars:
        if bar["name"] in ("attempt", "retry", "replay", "hedge"):
            check_line(bar["parts"], bar["begun_s"])
            assert sum(part["duration_s"] for part in bar["parts"]) == pytest.approx(bar["duration_s"])
    return bars


def check_line(bars: list[Bar], at_s: float) -> None:
    for bar in bars:
        assert bar["begun_s"] == pytest.approx(at_s)
        assert bar["duration_s"] > 0
        at_s += bar["duration_s"]


def line(bars: list[Bar]) -> list[tuple[str, float]]:
    return [(bar["name"], round(bar["duration_s"], 6)) for bar in bars]


def names(bars: list[Bar]) -> list[str]:
    return [bar["name"] for bar in bars]


def tried(bars: list[Bar]) -> list[Bar]:
    return [bar for bar in bars if bar["where"] != "router"]


BEFORE = [("read", 0.1), ("parse", 0.05), ("check", 0.05), ("admit", 0.2), ("prepare", 0.25), ("gate", 0.15)]


def test_a_call_of_a_pair_is_named_from_its_first_byte_to_its_last() -> None:
    bars = told(call([attempt()]))
    assert line(bars) == [*BEFORE, ("select", 0.2), ("attempt", 3.0), ("answer", 0.5)]
    assert unnamed_s(call([attempt()]), NOW_S) == pytest.approx(0)
    assert line(bars[4]["parts"]) == [("render", 0.1), ("tokenize", 0.1)]
    assert line(bars[7]["parts"]) == [
        ("prefill_queue", 0.1),
        ("prefill_compute", 0.5),
        ("messages", 0.1),
        ("decode_verify", 0.1),
        ("decode_join", 0.2),
        ("output", 2.0),
    ]
    assert [part["where"][-1] for part in bars[7]["parts"]] == ["1", "1", "1", "2", "2", "2"]


def test_what_decode_does_while_prefill_computes_is_a_part_of_that_bar() -> None:
    queue, compute, messages, *_ = told(call([attempt()]))[7]["parts"]
    assert line(queue["parts"]) == [("decode_queue", 0.1)]
    assert line(compute["parts"]) == [("decode_queue", 0.1), ("decode_transfer", 0.4)]
    assert line(messages["parts"]) == [("decode_transfer", 0.1)]


def test_a_worker_that_says_it_took_longer_than_the_router_waited_is_cut() -> None:
    slow = {
        LegKind.PREFILL: PREFILL._replace(compute_us=99_000_000),
        LegKind.DECODE: DECODE._replace(transfer_us=99_000_000),
    }
    bars = told(call([attempt(legs=slow)]))
    assert line(bars[7]["parts"]) == [("prefill_queue", 0.1), ("prefill_compute", 0.6), ("decode_transfer", 2.3)]


def test_a_prompt_that_takes_several_steps_has_a_bar_for_each_and_its_text_one_before_its_queue() -> None:
    slow = PREFILL._replace(tokenize_us=50_000, chunk_us=(200_000, 300_000))
    tokenize, queue, compute, *_ = told(call([attempt(legs={LegKind.PREFILL: slow})]))[7]["parts"]
    assert line([tokenize, queue, compute]) == [
        ("prefill_tokenize", 0.05),
        ("prefill_queue", 0.1),
        ("prefill_compute", 0.5),
    ]
    assert line(compute["parts"]) == [("chunk", 0.2), ("chunk", 0.1), ("chunk", 0.2)]
    check_line(compute["parts"], compute["begun_s"])
    late = slow._replace(chunk_us=(200_000, 900_000))  # the router had the first token before the last one began
    compute = told(call([attempt(legs={LegKind.PREFILL: late}, first_token_s=11.45)]))[7]["parts"][2]
    assert line(compute["parts"]) == [("chunk", 0.2), ("chunk", 0.1)]


def test_a_worker_that_serves_alone_has_no_stages_of_a_peer() -> None:
    alone = attempt(decode=P, legs={LegKind.LOCAL: PREFILL})
    (bar,) = tried(told(call([alone])))
    assert names(bar["parts"]) == ["prefill_queue", "prefill_compute", "messages", "output"]
    assert {part["where"] for part in bar["parts"]} == {f"{P:016x}"}


def test_attempts_follow_each_other_with_the_pause_between_them() -> None:
    bars = told(call([failed(), attempt(12.0, D2, ended_s=14.0)]))
    assert line(bars)[6:] == [
        ("select", 0.2),
        ("attempt", 0.5),
        ("pause", 0.3),
        ("select", 0.2),
        ("retry", 2.0),
        ("answer", 0.5),
    ]
    assert [bar["is_failure"] for bar in tried(bars)] == [True, False]
    assert names(tried(bars)[0]["parts"]) == ["prefill"]  # it told nothing


def test_an_attempt_after_tokens_is_a_replay() -> None:
    lost = failed(first_token_s=11.3, ended_s=11.6)
    bars = told(call([lost, attempt(12.0, ended_s=14.0)]))
    assert names(tried(bars)) == ["attempt", "replay"]
    assert names(tried(bars)[0]["parts"]) == ["prefill", "output"]


def test_an_attempt_that_another_worker_went_on_with_is_followed_by_its_move() -> None:
    moved = attempt(ended_s=12.0, outcome="moved")
    bars = told(call([moved, attempt(12.0, D2, first_token_s=12.0, ended_s=14.0)]))
    assert names(tried(bars)) == ["attempt", "move"]


def test_of_two_attempts_that_race_the_first_counts_until_the_second_that_won_began() -> None:
    slow = attempt(11.0, first_token_s=None, ended_s=12.5, outcome="hedged", legs={})
    bars = told(call([slow, attempt(11.6, D2, first_token_s=12.4, ended_s=14.0)]))
    assert line(bars)[6:] == [("select", 0.2), ("attempt", 0.4), ("select", 0.2), ("hedge", 2.4), ("answer", 0.5)]


def test_a_second_attempt_that_lost_lies_within_the_first() -> None:
    second = attempt(11.5, D2, first_token_s=None, ended_s=11.7, outcome="hedged", legs={})
    bars = told(call([attempt(), second]))
    (bar,) = tried(bars)
    assert names([part for tile in bar["parts"] for part in tile["parts"] if part["name"] == "hedge"])
    assert bar["duration_s"] == pytest.approx(3.0)


def test_two_that_race_still_are_one_bar() -> None:
    running: dict[str, Any] = {"first_token_s": None, "ended_s": None, "outcome": "running", "legs": {}}
    bars = told(call([attempt(**running), attempt(12.0, D2, **running)], ended_s=None, outcome="", answered_s=None))
    assert names(tried(bars)) == ["attempt"]
    assert bars[-1]["begun_s"] + bars[-1]["duration_s"] == pytest.approx(NOW_S - 10.0)


@pytest.mark.parametrize(
    ("num_marks", "expected"),
    [
        (0, "read"),
        (1, "parse"),
        (2, "check"),
        (3, "admit"),
        (4, "prepare"),
        (6, "prepare"),
        (7, "select"),
    ],
)
def test_a_client_that_leaves_before_a_worker_heard_of_it_was_waiting_for_the_next_stage(
    num_marks: int, expected: str
) -> None:
    left = call(marks=MARKS[:num_marks], ended_s=11.0, answered_s=None, status=None, outcome="disconnected")
    bars = told(left)
    assert bars[-1]["name"] == expected
    assert unnamed_s(left, NOW_S) == pytest.approx(0)


def test_a_call_that_is_refused_in_line_has_waited_and_then_got_its_answer() -> None:
    bars = told(call(marks=MARKS[:3], ended_s=12.0, answered_s=11.9, status=429, outcome="overloaded"))
    assert line(bars)[2:] == [("check", 0.05), ("admit", 1.7), ("answer", 0.1)]


def test_a_call_for_which_no_pair_came_waited_for_one() -> None:
    bars = told(call(marks=(*MARKS, ("select", 12.0)), ended_s=12.1, answered_s=12.05, outcome="unavailable"))
    assert line(bars)[-2:] == [("select", 1.35), ("answer", 0.1)]


def test_a_call_for_which_no_pair_came_back_waited_for_one() -> None:
    bars = told(call([failed()], marks=(*MARKS, ("select", 13.0)), ended_s=13.1, outcome="unavailable"))
    assert line(bars)[-3:] == [("attempt", 0.5), ("select", 1.5), ("answer", 0.1)]


def test_a_client_that_leaves_between_two_attempts_was_waiting() -> None:
    assert line(told(call([failed()], ended_s=12.0, outcome="disconnected")))[-1] == ("pause", 0.5)


def test_a_client_that_leaves_in_the_middle_of_its_output_ends_it() -> None:
    cut = attempt(ended_s=12.5, outcome="closed", legs={LegKind.PREFILL: PREFILL})
    bars = told(call([cut], ended_s=12.5, outcome="disconnected"))
    assert line(bars)[-1] == ("attempt", 1.5)
    assert names(bars[-1]["parts"]) == ["prefill_queue", "prefill_compute", "messages", "output"]


def test_waiting_for_a_slow_client_is_neither_output_nor_answer() -> None:
    writes = (Stage("write", 12.5, 13.0), Stage("write", 13.9, 14.4))
    bars = told(call([attempt()], writes=writes))
    assert line(tried(bars)[0]["parts"])[-4:] == [("output", 0.5), ("write", 0.5), ("output", 0.9), ("write", 0.1)]
    assert line(bars)[-2:] == [("write", 0.4), ("answer", 0.1)]


def test_the_wait_for_a_report_has_a_name() -> None:
    bars = told(call([attempt()], marks=(*MARKS, ("report", 14.3))))
    assert line(bars)[-2:] == [("report", 0.3), ("answer", 0.2)]


def test_outputs_of_one_call_are_parts_of_one_bar() -> None:
    bars = told(call([attempt()], [attempt(11.1, D2)]))
    assert line(bars)[-2:] == [("generate", 3.3), ("answer", 0.4)]
    assert [names(part["parts"]) for part in bars[-2]["parts"]] == [["select", "attempt"]] * 2


def test_a_call_that_runs_is_told_up_to_now() -> None:
    running = attempt(ended_s=None, outcome="running", legs={LegKind.PREFILL: PREFILL})
    bars = told(call([running], ended_s=None, outcome=""))
    assert bars[-1]["parts"][-1]["name"] == "output"
    assert bars[-1]["begun_s"] + bars[-1]["duration_s"] == pytest.approx(NOW_S - 10.0)


def test_a_call_that_nobody_followed_has_its_attempts_and_what_is_not_known() -> None:
    unseen = call([attempt(legs={}, asked_s=11.0)], path="", marks=(), ended_s=14.0)
    bars = bars_of(unseen, NOW_S)
    assert [(bar["name"], bar["begun_s"]) for bar in bars] == [("attempt", 1.0)]
    assert names(bars[0]["parts"]) == ["prefill", "output"]
    assert unnamed_s(unseen, NOW_S) == pytest.approx(1.0)


@pytest.mark.parametrize("legs", [{}, {LegKind.DECODE: DECODE}, {LegKind.PREFILL: PREFILL}, LEGS])
@pytest.mark.parametrize("first_token_s", [None, 11.0, 11.3, 13.0])
@pytest.mark.parametrize("ended_s", [11.0, 11.2, 13.0, None])
def test_whatever_is_told_an_attempt_is_whole(
    legs: Mapping[LegKind, LegTimes], first_token_s: float | None, ended_s: float | None
) -> None:
    made = attempt(legs=legs, first_token_s=first_token_s, ended_s=ended_s)
    assert unnamed_s(call([made]), NOW_S) == pytest.approx(0)
