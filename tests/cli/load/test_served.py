from __future__ import annotations

import json
import math

from diptych.cli.load.charts import chart
from diptych.cli.load.served import Served, as_json, result_of, table
from diptych.generation.slo import Slo

GOOD = Served(0.0, 0.0, (0.5, 0.6, 0.9), 10, 4, 5, "", 1.0)
SLOW = Served(1.0, 1.0, (3.0, 3.1), 10, 0, 2, "", 3.2)
LONE = Served(1.0, 1.0, (1.2,), 10, 0, 1, "", 1.3)
FAILED = Served(2.0, 2.5, error="status 429: full", ended_s=2.6)
CALLS = [GOOD, SLOW, LONE, FAILED]
SLO = Slo(ttft_s=1.0, tpot_s=0.2)


def test_a_call_is_told_in_times_of_its_tokens() -> None:
    assert (GOOD.ttft_s, GOOD.tpot_s, round(SLOW.ttft_s, 9)) == (0.5, 0.1, 2.0)
    assert math.isnan(LONE.tpot_s)
    assert [FAILED.ttft_s, FAILED.tpot_s, FAILED.e2e_s] == [math.inf] * 3
    assert [call.keeps(SLO) for call in CALLS] == [True, False, True, False]
    assert [call.keeps(Slo()) for call in CALLS] == [True, True, True, False]


def test_a_call_that_failed_counts_in_every_share() -> None:
    result = result_of(CALLS, SLO)
    assert (result.offered, result.served, result.good, result.most_in_flight) == (4, 3, 2, 2)
    assert (result.output_tokens, result.prompt_tokens, result.cached_tokens) == (8, 30, 4)
    assert (result.duration_s, result.goodput_per_s) == (3.2, 2 / 3.2)
    assert (result.ttft_s.p50, result.ttft_s.p99, result.failures) == (0.5, math.inf, (("status 429: full", 1),))
    assert round(result.itl_s.mean, 9) == round((0.1 + 0.3 + 0.1) / 3, 9)
    assert result.late_s == 0.5


def test_nobody_served_is_no_error_and_no_speed() -> None:
    result = result_of([FAILED], SLO)
    assert (result.good, result.output_tokens_per_s, result.ttft_s.mean) == (0, 0.0, math.inf)
    assert "never" in table(result, SLO)


def test_the_table_says_what_was_asked_for() -> None:
    text = table(result_of(CALLS, SLO), SLO)
    assert "3 of 4 served in 3.2 s" in text
    assert "50.0% within TTFT 1000 ms and TPOT 200 ms" in text
    assert "1 x status 429: full" in text
    assert "500 ms late" in text
    assert "goodput" not in table(result_of(CALLS, Slo()), Slo())


def test_programs_read_what_is_infinite_as_null() -> None:
    found = json.loads(json.dumps(as_json(result_of(CALLS, SLO), CALLS), allow_nan=False))
    assert found["ttft_s"] == {"mean": 0.9, "p50": 0.5, "p90": None, "p99": None}
    assert [row["tpot_s"] for row in found["calls"]] == [0.1, 0.1, None, None]


def test_a_chart_has_a_panel_for_each_time() -> None:
    text = chart(CALLS, "a <title>")
    assert [name in text for name in ("TTFT", "TPOT", "ITL", "E2E", "calls in flight", "a &lt;title&gt;")] == [True] * 6
    assert "never" not in chart([FAILED], "nobody")
