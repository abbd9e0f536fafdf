"""The usage log is exact to the token, whatever its disk does."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_disk

from diptych.common.errors import ConfigError
from diptych.router.serve.usage_log import UsageLog
from diptych.router.values.progress import MAX_ATTEMPTS
from diptych.router.values.usage import UsageRecord
from diptych.v1 import worker_pb2

Cluster = Any
METRICS = Path(__file__).parents[3] / "docs" / "api" / "metrics.md"


def records(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # torn by a full disk: it comes again
    return found


def record(number: int) -> UsageRecord:
    return UsageRecord(1.0, f"request-{number}", "alice", "m", "ok", number, 0, 1)


def test_each_output_has_a_line_whose_sum_is_what_clients_were_told(
    start_cluster: Callable[..., Cluster], tmp_path: Path, hang: Callable[[int], Any]
) -> None:
    path = tmp_path / "usage.jsonl"
    cluster = start_cluster(usage_log=path)
    answers = [cluster.post("/v1/completions", {"prompt": "p" * 9, "n": n})[1]["usage"] for n in (1, 3)]
    cluster.wait_until(lambda: len(records(path)) == 4)
    found = records(path)
    assert sum(each["prompt_tokens"] for each in found) == sum(each["prompt_tokens"] for each in answers) == 18
    assert sum(each["output_tokens"] for each in found) == sum(each["completion_tokens"] for each in answers)
    assert {(each["log"], each["model"], each["outcome"], each["tenant"]) for each in found} == {
        ("diptych-usage-1", "tiny", "ok", "")
    }
    assert len({each["request_id"] for each in found}) == 2
    cluster.decode().faults = [hang(0)]
    connection: http.client.HTTPConnection = cluster.connect(prompt="left", stream=True)
    connection.getresponse().readline()
    connection.close()
    cluster.wait_until(lambda: len(records(path)) == 5)
    left = records(path)[-1]
    assert (left["outcome"], left["prompt_tokens"], left["output_tokens"]) == ("disconnected", 4, 1)
    page = cluster.get("/metrics")[1]
    assert "diptych_router_usage_lines_total 5.0" in page
    told = {name for name in re.findall(r"^# TYPE (diptych_\w+)", page, re.MULTILINE) if not name.endswith("_created")}
    assert told - set(re.findall(r"`(diptych_\w+)[`{]", METRICS.read_text())) == set(), "not in docs/api/metrics.md"


def aborted(cluster: Cluster, path: Path) -> dict[str, Any]:
    """Abort a completion while prefill says nothing; return its line."""
    num_started, num_records = len(cluster.prefill().started), len(records(path))
    connection: http.client.HTTPConnection = cluster.connect(prompt="left", headers={"x-request-id": "it"})
    cluster.wait_for(lambda: len(cluster.prefill().started) > num_started)
    assert cluster.post("/abort_request", {"rid": "it"}) == (200, {"num_aborted": 1})
    assert connection.getresponse().status == 499
    connection.close()
    cluster.wait_until(lambda: len(records(path)) > num_records)
    return records(path)[-1]


def test_who_was_aborted_did_not_leave_and_a_prompt_counts_once_a_worker_has_begun_with_it(
    start_cluster: Callable[..., Cluster], tmp_path: Path, hang: Callable[[int], Any], fail: Callable[..., Any]
) -> None:
    path = tmp_path / "usage.jsonl"
    cluster = start_cluster(usage_log=path)
    cluster.prefill().faults = [hang(0)]
    line = aborted(cluster, path)
    assert (line["outcome"], line["prompt_tokens"]) == ("aborted", 4), "prefill has it"
    cluster.prefill().faults = [fail(0, worker_pb2.ERROR_CODE_OVERLOADED)] * MAX_ATTEMPTS
    assert cluster.post("/v1/completions", {"prompt": "left"})[0] == 429
    cluster.wait_until(lambda: len(records(path)) == 2)
    line = records(path)[-1]
    assert (line["outcome"], line["prompt_tokens"]) == ("overloaded", 0), "nobody would have it"
    cluster.publish()
    cluster.wait_until(lambda: not cluster.router.fleet.pairs())
    assert cluster.post("/v1/completions", {"prompt": "left"})[0] == 503
    cluster.wait_until(lambda: len(records(path)) == 3)
    line = records(path)[-1]
    assert (line["outcome"], line["prompt_tokens"]) == ("unavailable", 0), "nobody was there"


def test_the_length_of_a_prompt_that_no_worker_has_told_yet_is_not_guessed(
    start_cluster: Callable[..., Cluster], tmp_path: Path, hang: Callable[[int], Any]
) -> None:
    path = tmp_path / "usage.jsonl"
    cluster = start_cluster(usage_log=path, tokenize_at="worker")
    cluster.prefill().faults = [hang(0)]
    assert aborted(cluster, path)["prompt_tokens"] == 0
    told = cluster.post("/v1/completions", {"prompt": "left"})[1]["usage"]["prompt_tokens"]
    cluster.wait_until(lambda: len(records(path)) == 2)
    assert records(path)[-1]["prompt_tokens"] == told > 0


def test_a_line_behind_one_that_was_cut_off_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(b'{"log":"diptych-us')  # of an earlier life
    log = UsageLog(path)
    log.add(record(0))
    while not records(path):
        pass
    with path.open("ab") as other:
        other.write(b'{"log":')  # of another process
    log.add(record(1))
    log.close()
    assert [each["request_id"] for each in records(path)] == ["request-0", "request-1"]
    assert path.read_text().count("\n") == 4, "and no line is empty"


def test_who_moves_the_file_away_gets_a_new_one(tmp_path: Path) -> None:
    path, old = tmp_path / "usage.jsonl", tmp_path / "old.jsonl"
    log = UsageLog(path)
    log.add(record(0))
    while not records(path):
        pass
    path.rename(old)
    log.add(record(1))
    log.close()
    assert [[each["request_id"] for each in records(file)] for file in (old, path)] == [["request-0"], ["request-1"]]


@pytest.mark.integration
def test_a_full_disk_costs_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk.small_disk(tmp_path / "disk", 16384) as disk:
        ballast, path = disk / "ballast", disk / "usage.jsonl"
        log = UsageLog(path, max_waiting=50)
        ballast.write_bytes(bytes(10000))
        for number in range(200):
            log.add(record(number))
        while "can't write the usage log" not in caplog.text:
            pass
        ballast.unlink()
        log.close()
        found = records(path)
    assert sum(each["requests"] for each in found) == 200
    assert sum(each["prompt_tokens"] for each in found) == sum(range(200))


@pytest.mark.integration
def test_what_could_not_be_written_in_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk.small_disk(tmp_path / "disk", 8192) as disk:
        log = UsageLog(disk / "usage.jsonl")
        (disk / "ballast").write_bytes(bytes(4096))
        for number in range(200):
            log.add(record(number))
        log.close()
    assert "lines, as" in caplog.text


def test_a_file_that_can_not_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--usage-log: .* can't be written: Is a directory"):
        UsageLog(tmp_path)
