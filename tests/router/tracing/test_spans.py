"""Tables of what was noted of a call against the spans that are made of it. A call begins at 10 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.finish import Finish
from diptych.router.choose.explain import AttemptRecord, Selection
from diptych.router.choose.policies import plan_of
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.tracing.record import (
    MAX_OUTPUTS,
    AttemptTrace,
    CallTrace,
    EntryPoint,
    OutputTrace,
    Span,
    Stage,
    parts_of,
    span_of,
)
from diptych.router.values.output import End, Usage
from diptych.router.workers.worker_view import Pair, WorkerLoad
from diptych.v1.worker_pb2 import LegStats

PAIR = Pair(1, 2)
EDGE = EntryPoint(
    "POST /v1/completions", {"http.route": "/v1/completions"}, "http.response.status_code", "/v1/completions"
)
PREFILL_STATS = LegStats(queue_us=10_000, compute_us=20_000, transfer_us=5_000, cached_tokens=16, bytes_moved=512)
DECODE_STATS = LegStats(queue_us=1_000, transfer_us=40_000, verify_us=2_000, join_us=3_000)
STATS = {LegKind.PREFILL: PREFILL_STATS, LegKind.DECODE: DECODE_STATS}


def attempt(pair: Pair = PAIR, at_s: float = 10.2, **record: Any) -> AttemptTrace:
    """One that a pair was asked for at `at_s`; 0.1 s later it began, and ended well after another second."""
    workers = {each: Worker(each, WorkerLoad(0, 0, 1000)) for each in (pair.prefill_id, pair.decode_id)}
    candidates = Candidates(workers, {pair.prefill_id: (pair.decode_id,)})
    selection = Selection(plan_of("least_load"), candidates, RequestView(prompt_len=20, number=0), pair)
    defaults = {"begun_s": at_s + 0.1, "first_token_s": at_s + 0.2, "ended_s": at_s + 1.1, "outcome": "stop"}
    return AttemptTrace(at_s, AttemptRecord(selection, 7, **{**defaults, **record}), STATS)


def end(output_tokens: int = 5) -> End:
    return End(Finish.STOP, Usage(20, output_tokens, 16))


def call(*outputs: OutputTrace, **fields: Any) -> CallTrace:
    stages = [Stage("admit", 10.0, 10.05), Stage("prepare", 10.05, 10.2)]
    defaults = {"stages": stages, "outputs": list(outputs), "status": 200, "outcome": "ok", "ended_s": 12.0}
    return CallTrace(EDGE, 10.0, 0, {}, lambda: 0.0, **{**defaults, **fields})


def names(span: Span) -> Any:
    return {span.name: [names(child) for child in span.children]} if span.children else span.name


def times(span: Span) -> dict[str, Any]:
    return {child.name: pytest.approx((child.begun_s, child.ended_s)) for child in span.children}


def test_a_call_says_what_it_asked_for_and_what_came_of_it() -> None:
    asked = {"gen_ai.request.model": "tiny"}
    assert span_of(call(OutputTrace([attempt()], end()), attributes=asked)) == Span(
        "POST /v1/completions",
        10.0,
        12.0,
        {
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.request.model": "tiny",
            "gen_ai.usage.input_tokens": 20,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 16,
            "gen_ai.response.finish_reasons": ["stop"],
            "diptych.attempts": 1,
            "diptych.outcome": "ok",
        },
    )


@pytest.mark.parametrize(
    ("outcome", "status", "is_failure"),
    [
        ("unavailable", 503, True),
        ("deadline", 504, True),
        ("error", 500, True),
        ("overloaded", 429, False),
        ("invalid", 400, False),
        ("disconnected", None, False),
    ],
)
def test_failures_are_those_that_are_not_the_clients_doing(outcome: str, status: int | None, is_failure: bool) -> None:
    span = span_of(call(outcome=outcome, status=status))
    assert span.is_failure == is_failure
    assert (span.attributes["error.type"], span.attributes["diptych.outcome"]) == (outcome, outcome)
    assert span.attributes.get("http.response.status_code") == status
    assert "gen_ai.usage.output_tokens" not in span.attributes


def test_tokens_are_counted_as_the_client_gets_them_counted() -> None:
    """A prompt once, whatever was made of it."""
    made = [OutputTrace([attempt()], end(output_tokens)) for output_tokens in (5, 7)]
    attributes = span_of(call(*made, num_made=2)).attributes
    assert [attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output")] == [20, 12]


def test_below_a_call_are_its_stages_and_its_outputs() -> None:
    parts = parts_of(call(OutputTrace([attempt()], end()), OutputTrace([attempt()], end())))
    prefill = {"prefill": ["prefill_queue", "prefill_compute", "prefill_transfer"]}
    decode = {"decode": ["decode_queue", "decode_transfer", "decode_verify", "decode_join"]}
    generate = {"generate": ["select", {"attempt": [prefill, decode]}]}
    assert [names(part) for part in parts] == ["admit", "prepare", generate, generate]


def test_what_workers_measured_is_placed_from_the_moment_that_the_attempt_began() -> None:
    *_, generate = parts_of(call(OutputTrace([attempt()], end())))
    _, tried = generate.children
    prefill, decode = tried.children
    assert times(generate) == {"select": (10.2, 10.3), "attempt": (10.3, 11.3)}
    assert times(tried) == {"prefill": (10.3, 10.335), "decode": (10.3, 11.3)}
    assert times(prefill) == {
        "prefill_queue": (10.3, 10.31),
        "prefill_compute": (10.31, 10.33),
        "prefill_transfer": (10.33, 10.335),
    }
    assert times(decode) == {
        "decode_queue": (10.3, 10.301),
        "decode_transfer": (10.301, 10.341),
        "decode_verify": (10.341, 10.343),
        "decode_join": (10.343, 10.346),
    }


def test_an_attempt_names_its_pair_and_the_moment_of_its_first_token() -> None:
    *_, generate = parts_of(call(OutputTrace([attempt()], end())))
    tried = generate.children[1]
    assert tried.attributes == {
        "diptych.prefill_instance": f"{1:016x}",
        "diptych.decode_instance": f"{2:016x}",
        "diptych.room": f"{7:016x}",
        "diptych.policy": "least_load",
        "diptych.outcome": "stop",
    }
    assert [event.name for event in tried.events] == ["first_token"]
    assert tried.events[0].at_s == pytest.approx(10.4)
    assert tried.children[0].attributes == {
        "diptych.instance": f"{1:016x}",
        "diptych.cached_tokens": 16,
        "diptych.bytes_moved": 512,
    }


def test_every_attempt_is_there_and_one_that_failed_is_marked() -> None:
    failed = attempt(first_token_s=None, outcome="failed: decode leg: PEER_LOST: gone", ended_s=10.5)
    retried = call(OutputTrace([failed, attempt(Pair(1, 3), at_s=10.6)], end()))
    *_, generate = parts_of(retried)
    tried = [child for child in generate.children if child.name == "attempt"]
    assert [(each.is_failure, each.events == ()) for each in tried] == [(True, True), (False, False)]
    assert [each.attributes["diptych.decode_instance"] for each in tried] == [f"{2:016x}", f"{3:016x}"]
    assert (generate.attributes["diptych.attempts"], span_of(retried).attributes["diptych.attempts"]) == (2, 2)
    assert (generate.begun_s, generate.ended_s) == pytest.approx((10.2, 11.7))


def test_a_worker_that_serves_alone_has_one_leg_and_sends_nothing() -> None:
    alone = replace(attempt(Pair(1, 1)), stats={LegKind.LOCAL: PREFILL_STATS})
    *_, generate = parts_of(call(OutputTrace([alone], end())))
    (leg,) = generate.children[1].children
    assert names(leg) == {"local": ["prefill_queue", "prefill_compute"]}
    assert leg.ended_s == pytest.approx(11.3)


def test_a_leg_that_reported_nothing_lasts_as_long_as_its_attempt() -> None:
    """And an attempt that nobody has ended, as long as the call."""
    cut = replace(attempt(ended_s=None), stats={})
    *_, generate = parts_of(call(OutputTrace([cut])))
    assert times(generate.children[1]) == {"prefill": (10.3, 12.0), "decode": (10.3, 12.0)}
    assert generate.attributes == {"diptych.attempts": 1}


def test_a_call_for_many_outputs_shows_the_first_of_them() -> None:
    made = call(*(OutputTrace([attempt()], end()) for _ in range(MAX_OUTPUTS + 1)))
    assert [part.name for part in parts_of(made)].count("generate") == MAX_OUTPUTS
    assert span_of(made).attributes["diptych.attempts"] == MAX_OUTPUTS + 1


def test_an_output_for_which_no_pair_was_found_has_no_span() -> None:
    assert [part.name for part in parts_of(call(OutputTrace(), outcome="unavailable"))] == ["admit", "prepare"]
