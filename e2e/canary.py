"""A second pool of each role beside the first one, and who serves whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from cluster import TIMEOUT_S, Cluster
from release import NAME

VALUES: Final = f"--values={Path(__file__).with_name('canary.yaml')}"  # each with half of the requests
TRIED: Final = '--set-json=declared.pools={"default": 1, "next": 0}'  # by who names it alone
EMPTY: Final = "--set=prefill.pools[1].replicas=0,decode.pools[1].replicas=0"  # declared before it has workers
PROMOTED: Final = '--set-json=declared.pools={"default": 0, "next": 1}'
ALONE: Final = f"--values={Path(__file__).with_name('next_alone.yaml')}"  # without the old pools
# Runs in each router until it answers whoever names the pool with this status.
NAME_IT: Final = """
import http.client, json, os, sys, time
body = json.dumps({"model": "", "prompt": "a", "max_tokens": 1})
headers = {"content-type": "application/json", "authorization": "Bearer " + sys.argv[2], "x-diptych-pool": sys.argv[1]}
deadline_s = time.monotonic() + 180
while True:
    connection = http.client.HTTPConnection("localhost", 8000)
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    said = answer.read().decode()
    if answer.status == int(sys.argv[3]):
        break
    assert time.monotonic() < deadline_s, said
    time.sleep(1)
"""
COUNT: Final = """
import sys, urllib.request
page = urllib.request.urlopen("http://localhost:8081/metrics").read().decode()
lines = [line for line in page.splitlines() if line.startswith(sys.argv[1]) and sys.argv[2] in line]
print(sum(float(line.rpartition(" ")[2]) for line in lines))
"""


def served_by(cluster: Cluster, pool: str) -> float:
    """Return how many attempts were begun in a declared pool, by the routers that run."""
    return sum(asked(cluster, "diptych_router_declared_pool_attempts_total", f'pool="{pool}"'))


def running_in(cluster: Cluster, pool: str) -> float:
    """Return how many requests are in a pool, as routers know it."""
    return max(asked(cluster, "diptych_router_pool_requests_running", f'pool="{pool}"'))


def wait_until_declared(cluster: Cluster, pool: str) -> None:
    """Wait until each router knows the pool, which has no workers yet."""
    _name_it(cluster, pool, HTTPStatus.SERVICE_UNAVAILABLE)


def wait_until_served_by_name(cluster: Cluster, pool: str) -> int:
    """Wait until each router serves whoever names the pool, and return how many requests it took."""
    return _name_it(cluster, pool, HTTPStatus.OK)


def _name_it(cluster: Cluster, pool: str, status: HTTPStatus) -> int:
    key, routers = cluster.secret(f"{NAME}-diptych-api-keys", "key"), _routers(cluster)
    for router in routers:
        cluster.kubectl("exec", router, "--", "python", "-c", NAME_IT, pool, key, str(int(status)))
    return len(routers)


def wait_until(is_so: Callable[[], bool], words: str) -> None:
    """The kubelet brings what is declared when it likes."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, words
        time.sleep(1)


def asked(cluster: Cluster, name: str, label: str = "") -> list[float]:
    """Return a metric of each router that runs, summed over those of its labels that have these words."""
    command = ("python", "-c", COUNT, name, label)
    return [float(cluster.kubectl("exec", each, "--", *command)) for each in _routers(cluster)]


def _routers(cluster: Cluster) -> list[str]:
    found = cluster.get("pods", "-l", f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=router")
    return [each["metadata"]["name"] for each in found]
