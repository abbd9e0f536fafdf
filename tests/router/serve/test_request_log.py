"""The request log has a line for each output, from which simulations make the same load, and no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.router.serve.request_log import RequestLog
from diptych.simulator.traces.reading import read_calls

Cluster = Any
SECRET = "the plan is secret"


def test_each_output_gets_a_line_with_lengths_times_and_names_of_blocks(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    cluster = start_cluster(request_log=path, slo_tiers=("batch:ttft_ms=9000",))
    for tail, tier, more in (("a", "default", {}), ("bc", "batch", {"n": 2})):
        body = {"prompt": SECRET * 40 + tail, "max_tokens": 20, **more}
        headers = {"x-diptych-session": "Alice's", "x-diptych-slo": tier}
        assert cluster.post("/v1/completions", body, headers)[0] == 200
    cluster.wait_until(lambda: path.read_text().count("\n") == 3)
    text = path.read_text()
    assert "secret" not in text
    assert "Alice" not in text
    first, *others = (json.loads(line) for line in text.splitlines())
    assert first["prompt_len"] == 40 * len(SECRET) + 1
    assert first["output_len"] == len("Hello!") + 1
    assert first["finish"] == "stop"
    assert 0 < first["ttft_s"] < 200
    assert {each["session"] for each in others} == {first["session"]} != {""}
    assert [first["tier"], *(each["tier"] for each in others)] == ["default", "batch", "batch"]
    one, two, three = read_calls(text.splitlines())
    assert (one.blocks == two.blocks).tolist() == [True, False]
    assert (two.blocks == three.blocks).all()
    assert two.prompt_len == one.prompt_len + 1


def test_a_file_that_can_not_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log: .* can't be written: Is a directory"):
        RequestLog(tmp_path)
