"""What operators see of the KV links of a running platform: `diptych links`, and each worker's /metrics."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

Platform = Any
PROMPT = list(range(40))
METRICS = Path(__file__).parents[2] / "docs" / "api" / "metrics.md"


@pytest.fixture(scope="module")
def platform(
    platform_class: type[Any], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Two prefill workers and a decode worker, which have served one request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_KV_CACHE_MIB", "8")
        options = ("--model", str(tiny_folder), "--device", "sim")
        running = platform_class(tmp_path_factory.mktemp("links") / "log", prefill=2, options=options)
    try:
        running.complete(PROMPT, 4, ignore_eos=True)
        yield running
    finally:
        running.stop()


def links(platform: Platform, *options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "diptych.cli", "links", "--bootstrap", f"127.0.0.1:{platform.bootstrap_port}")
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=200) as answer:
        text: str = answer.read().decode()
        return text


def scrape(address: str) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(page(address)) for sample in family.samples]
    return {",".join([s.name, *(value for _, value in sorted(s.labels.items()))]): s.value for s in samples}


def test_every_link_is_shown_from_both_ends(platform: Platform, wait_for: Any) -> None:
    def ends() -> int:
        return sum(len(worker["links"]) for worker in json.loads(links(platform, "--json").stdout))

    wait_for(lambda: ends() == 6, 200.0, "links of all three workers with each other")
    wait_for(lambda: links(platform, "--json").returncode == 0, 200.0, "every link is up")
    workers = json.loads(links(platform, "--json").stdout)
    peers = {
        (worker["role"], worker["instance_id"], link["peer"], link["state"])
        for worker in workers
        for link in worker["links"]
    }
    prefills = [worker["instance_id"] for worker in workers if worker["role"] == "prefill"]
    (decode,) = [worker["instance_id"] for worker in workers if worker["role"] == "decode"]
    handing = {("prefill", each, decode, "up") for each in prefills} | {
        ("decode", decode, each, "up") for each in prefills
    }
    pulling = {("prefill", one, other, "up") for one, other in itertools.permutations(prefills, 2)}
    assert peers == handing | pulling
    assert all(link["lanes"] for worker in workers for link in worker["links"])
    text = links(platform).stdout
    assert all(f"decode {decode}" in block for block in text.split("\n\n"))


def test_workers_serve_their_transfer_metrics(platform: Platform) -> None:
    platform.assert_clean()
    sent = [scrape(each.metrics_address) for each in platform.instances() if each.role == 1]
    (decode,) = [scrape(each.metrics_address) for each in platform.instances() if each.role == 2]
    assert decode["diptych_worker_up,0"] == 1
    assert decode["diptych_kv_transfer_seconds_count"] == 1
    assert decode["diptych_kv_integrity_failures_total,0"] == decode["diptych_kv_leaks_found,0"] == 0
    received = decode["diptych_kv_transfer_bytes_total,received,0"]
    assert received == sum(each["diptych_kv_transfer_bytes_total,sent,0"] for each in sent) > 0
    assert decode["diptych_kv_pages,0,quarantined"] == 0
    assert decode["diptych_kv_listener_guarded,0"] == 1
    assert sum(value for name, value in decode.items() if name.startswith("diptych_kv_link_up")) == 2


def test_every_metric_of_routers_and_workers_is_documented(platform: Platform) -> None:
    described = set(re.findall(r"`(diptych_\w+)[`{]", METRICS.read_text()))
    pages = [platform.metrics(), *(page(each.metrics_address) for each in platform.instances() if each.role in (1, 2))]
    told = {name for text in pages for name in re.findall(r"^# TYPE (diptych_\w+)", text, re.MULTILINE)}
    assert len(told) > 50
    assert {name for name in told if not name.endswith("_created")} - described == set()
    assert all(f'diptych_build_info{{version="{version("diptych")}"}} 1.0' in text for text in pages)


def test_a_scheduler_that_does_not_answer_is_down_in_metrics_and_named_by_links(
    platform: Platform, wait_for: Any
) -> None:
    (decode,) = [each for each in platform.instances() if each.role == 2]
    (worker,) = platform.components("decode")
    (scheduler,) = [child for child in worker.children() if "diptych.unified.scheduler" in child.cmdline()]
    scheduler.suspend()
    try:
        assert scrape(decode.metrics_address)["diptych_worker_up,0"] == 0
        answer = links(platform, "--timeout-s", "1")
        assert answer.returncode == 1
        assert "does not answer" in answer.stdout
        wait_for(lambda: scrape(decode.metrics_address)["diptych_worker_silent_seconds,0"] > 0, 200.0, "it is silent")
    finally:
        scheduler.resume()
    wait_for(lambda: scrape(decode.metrics_address)["diptych_worker_up,0"] == 1, 200.0, "it answers again")
    wait_for(lambda: scrape(decode.metrics_address)["diptych_worker_silent_seconds,0"] == 0, 200.0, "it is heard")
    wait_for(lambda: links(platform).returncode == 0, 200.0, "every link is up again")


@pytest.mark.parametrize(("what", "words"), [("answers", "HTTP and gRPC agree: "), ("kv", "\nlanes: ")])
def test_check_says_that_answers_agree_and_what_kv_moves_over(platform: Platform, what: str, words: str) -> None:
    places = ("--router", platform.url, "--target", platform.grpc_target)
    replicas = ("--bootstrap", f"127.0.0.1:{platform.bootstrap_port}", "--prompt-tokens", "40")
    command = (sys.executable, "-m", "diptych.cli", "check", what, *places, *replicas)
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    assert words in found.stdout
