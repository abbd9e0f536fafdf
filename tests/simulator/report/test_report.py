"""Reports count what was offered: who serves less does not look better."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from diptych.generation.slo import Slo
from diptych.simulator.outcome import Outcome
from diptych.simulator.report.errors import errors, typical
from diptych.simulator.report.plot import plot
from diptych.simulator.report.summary import Percentiles, of_tiers, summary
from diptych.simulator.report.table import Result, as_json, error_table, table
from diptych.simulator.traces.measured import Measured

NAN = math.nan
SLO = Slo(1.0, 0.1)
OUTCOME = Outcome(  # in time; a late first token; slow ones after it; refused; broken off
    arrival_s=np.array([0.0, 1.0, 2.0, 3.0, 4.0]),
    first_s=np.array([0.5, 3.0, 2.5, NAN, 4.5]),
    last_s=np.array([1.0, 4.0, 9.5, NAN, NAN]),
    prefill_id=np.array([1, 2, 1, 0, 2]),
    decode_id=np.array([3, 3, 3, 0, 3]),
    prompt_len=np.array([100, 100, 200, 5000, 100]),
    output_len=np.array([11, 11, 11, 11, 11]),
    cached_len=np.array([0, 50, 100, 0, 0]),
    failure=("", "", "", "queue is full", "worker died"),
    gpu_s=7200.0,
    num_flips=2,
    moved_bytes=3_000_000_000,
    num_steps=40,
    virtual_s=10.0,
    decisions_digest="0123456789abcdef0123",
)


def test_shares_and_percentiles_are_of_all_that_was_offered() -> None:
    found = summary(OUTCOME, SLO)
    assert (found.offered, found.served, found.good) == (5, 3, 1)
    assert (found.attainment, found.ttft_attainment, found.tpot_attainment) == (0.2, 0.4, 0.4)
    assert found.ttft_s == Percentiles(2.0, math.inf, math.inf)
    assert found.e2e_s == Percentiles(7.5, math.inf, math.inf)
    assert found.hit_rate == 150 / 500  # of prompts that somebody computed
    assert (found.goodput_per_s, found.gpu_hours, found.good_per_gpu_hour) == (0.1, 2.0, 0.5)
    assert (found.flips, found.moved_gb, found.steps) == (2, 3.0, 40)
    assert dict(found.failures) == {"queue is full": 1, "worker died": 1}
    assert not found.holds_90


def test_serving_fewer_never_improves_a_number() -> None:
    fewer = replace(OUTCOME, first_s=np.where(np.arange(5) == 2, NAN, OUTCOME.first_s))
    fewer = replace(fewer, last_s=np.where(np.arange(5) == 2, NAN, OUTCOME.last_s))
    more, less = summary(OUTCOME, SLO), summary(fewer, SLO)
    assert less.attainment <= more.attainment
    assert less.ttft_attainment < more.ttft_attainment
    assert all(a >= b for a, b in zip(less.e2e_s, more.e2e_s, strict=True))


def test_where_nobody_said_what_good_is_all_that_is_served_is() -> None:
    assert summary(OUTCOME, Slo()).good == 3
    lenient = [SLO, Slo(5.0, 0.1), SLO, SLO, SLO]
    assert summary(OUTCOME, SLO, lenient).good == 2


def test_tiers_are_summed_up_by_themselves() -> None:
    tiers = ["a", "b", "b", "a", "b"]
    found = of_tiers(OUTCOME, [SLO] * 5, tiers)
    assert {tier: (each.offered, each.good) for tier, each in found.items()} == {"a": (2, 1), "b": (3, 0)}
    shown = table({"pair_cost": Result(summary(OUTCOME, SLO), found)})
    assert "b: kept their SLO" in shown
    assert "0 of 3" in shown


def test_nothing_served_and_one_token_are_no_errors() -> None:
    nothing = replace(OUTCOME, first_s=np.full(5, NAN), last_s=np.full(5, NAN), prefill_id=np.zeros(5, np.int64))
    found = summary(replace(nothing, output_len=np.ones(5, np.int64), gpu_s=0.0), SLO)
    assert found.good == 0
    assert np.isnan((*found.tpot_s, found.hit_rate, found.good_per_gpu_hour)).all()
    assert "never" in table({"none": Result(found)})


def test_policies_stand_side_by_side_as_a_table_and_as_json() -> None:
    results = {"pair_cost": Result(summary(OUTCOME, SLO)), "random": Result(summary(OUTCOME, Slo()))}
    lines = table(results).splitlines()
    assert lines[0].split() == ["pair_cost", "random"]
    assert len({len(line) for line in lines[:20]}) == 1
    (row,) = (line for line in lines if line.startswith("TTFT ms"))
    assert row.split()[-2:] == ["2000/never/never", "2000/never/never"]
    assert "pair_cost: 1 of 5 failed: worker died" in lines
    again = json.loads(json.dumps(as_json(results), allow_nan=False))
    assert again["random"]["good"] == 3
    assert again["pair_cost"]["ttft_s"] == {"p50": 2.0, "p90": None, "p99": None}


def test_errors_are_of_calls_that_have_both_times() -> None:
    served = OUTCOME.first_s - OUTCOME.arrival_s
    measured = Measured(
        2 * served, np.full(5, NAN), OUTCOME.last_s - OUTCOME.arrival_s, OUTCOME.prompt_len, np.zeros(5, np.int64)
    )
    found = {each.name: each for each in errors(OUTCOME, measured)}
    assert found["TTFT p50"].relative == pytest.approx(-0.5)
    assert found["E2E p99"].relative == 0.0
    assert "TPOT mean" not in found
    assert found["hit rate"][1:] == (0.0, 150 / 5500)
    assert typical(OUTCOME, measured)[0] == ("TTFT", 0.5, 0.5)
    assert "-50.0 %" in error_table(list(found.values()), typical(OUTCOME, measured))


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_plot_has_a_line_for_each_policy_in_each_panel(is_empty: bool) -> None:
    outcome = replace(OUTCOME, first_s=np.full(5, NAN), last_s=np.full(5, NAN)) if is_empty else OUTCOME
    drawn = ET.fromstring(plot({"pair_cost": outcome, "a<b": OUTCOME}, "x & y"))
    words = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("a<b") == words.count("pair_cost") == 4
    points = [each.get("points", "") for each in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(points) == (6 if is_empty else 9)
    assert not any("nan" in each for each in points)
