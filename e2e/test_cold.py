"""Pools at zero: the model stays listed, a request waits until workers are there, and its answer says how long."""

from __future__ import annotations

import json
from typing import Any, Final

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE
from release import COLD, DEPLOYMENTS, NAME, Release

_, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
ASK: Final = f"""
import http.client, json, sys
connection = http.client.HTTPConnection("{NAME}-diptych-router", 8000)
connection.request(*sys.argv[1:], headers={{"content-type": "application/json"}})
answer = connection.getresponse()
told = {{"status": answer.status, "waited_s": answer.headers["x-diptych-waited-for-workers-s"]}}
print(json.dumps({{**told, "body": json.loads(answer.read())}}))
"""
PROMPT: Final = json.dumps({"model": "sim", "prompt": "a", "max_tokens": 4, "temperature": 0})

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *COLD)


def asking(*words: str) -> tuple[str, ...]:
    return ("exec", f"deployment/{ROUTERS}", "--", "python", "-c", ASK, *words)


def ask(cluster: Cluster, *words: str) -> dict[str, Any]:
    return dict(json.loads(cluster.kubectl(*asking(*words))))


def test_installing(release: Release) -> None:
    release.install()


def test_a_request_wakes_pools_at_zero_and_is_answered(release: Release, cluster: Cluster) -> None:
    warm = ask(cluster, "POST", "/v1/completions", PROMPT)
    assert (warm["status"], warm["waited_s"]) == (200, None)
    for deployment in (PREFILL, DECODE):
        cluster.kubectl("scale", f"deployment/{deployment}", "--replicas=0")
    release.settle(PREFILL, DECODE)
    listed = ask(cluster, "GET", "/v1/models")
    assert [each["id"] for each in listed["body"]["data"]] == ["sim"]
    with cluster.begin(*asking("POST", "/v1/completions", PROMPT)) as first:
        waiting = "diptych_router_requests_waiting_for_workers"
        canary.wait_until(lambda: sum(canary.asked(cluster, waiting)) == 1, "nobody waits for workers")
        for deployment in (PREFILL, DECODE):  # as KEDA does, which sees the request
            cluster.kubectl("scale", f"deployment/{deployment}", "--replicas=1")
        printed, _ = first.communicate(timeout=120)
    told = json.loads(printed)
    print("\n     ", printed.strip(), flush=True)
    assert told["status"] == 200
    assert 0 < float(told["waited_s"]) < 120
    assert told["body"]["choices"][0]["text"] == warm["body"]["choices"][0]["text"]


def test_uninstalling(release: Release) -> None:
    release.uninstall()
