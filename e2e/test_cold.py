"""Pools that end by their ScaledObjects: the model stays listed, a request wakes them, and its answer says how long.

KEDA itself does not run here: `keda.py` evaluates the chart's queries over the pods' pages, and scales as it would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import canary
import keda
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
def release(cluster: Cluster) -> Iterator[Release]:
    kind = keda.kind()
    name = f"customresourcedefinition/{kind['metadata']['name']}"
    cluster.apply(kind)
    cluster.wait(name, "condition=Established")
    scaler = keda.Keda(cluster, NAME)
    scaler.start()
    yield Release(cluster, IMAGE, *COLD)
    scaler.close()
    cluster.kubectl("delete", name, "--wait=false")


def at_zero(cluster: Cluster) -> bool:
    pools = [each for each in cluster.get("deployments") if each["metadata"]["name"] in (PREFILL, DECODE)]
    return [each["spec"]["replicas"] for each in pools] == [0, 0]


def asking(*words: str) -> tuple[str, ...]:
    return ("exec", f"deployment/{ROUTERS}", "--", "python", "-c", ASK, *words)


def ask(cluster: Cluster, *words: str) -> dict[str, Any]:
    return dict(json.loads(cluster.kubectl(*asking(*words))))


def test_installing(release: Release) -> None:
    release.install()


def test_pools_that_nobody_asks_end_and_a_request_wakes_them(release: Release, cluster: Cluster) -> None:
    warm = ask(cluster, "POST", "/v1/completions", PROMPT)
    assert (warm["status"], warm["waited_s"]) == (200, None)
    canary.wait_until(lambda: at_zero(cluster), "the pools never end")
    release.settle(PREFILL, DECODE)
    listed = ask(cluster, "GET", "/v1/models")
    assert [each["id"] for each in listed["body"]["data"]] == ["sim"]
    told = ask(cluster, "POST", "/v1/completions", PROMPT)
    print("\n     ", json.dumps(told), flush=True)
    assert told["status"] == 200
    assert 0 < float(told["waited_s"]) < 120
    assert told["body"]["choices"][0]["text"] == warm["body"]["choices"][0]["text"]
    release.settle(PREFILL, DECODE)
    assert [len(release.pods(pool)) for pool in (PREFILL, DECODE)] == [1, 1], "nobody needs a second worker"


def test_uninstalling(release: Release) -> None:
    release.uninstall()
