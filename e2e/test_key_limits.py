"""A key's limits hold for all routers and processes together, whose logs have every token that clients were told of."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Final, NamedTuple

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE
from release import DEPLOYMENTS, KEY_LIMITS, Release

ROUTERS: Final = DEPLOYMENTS[1]
KEY: Final = "dk-end-to-end"
PER_MINUTE: Final = 120
LASTS_S: Final = 75
HEARD_S: Final = 3  # decision 0143: so late one router hears what another has done
# Runs in a pod of the release; prints what each router gave, and when. Each answer is one call.
TAKE_ALL: Final = """
import http.client, json, sys, threading, time
lasts_s, key, *hosts = float(sys.argv[1]), *sys.argv[2:]
began_s, given, odd, used = time.monotonic(), [], [], []
def take(host):
    connection = http.client.HTTPConnection(host, 8000)
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    while time.monotonic() < began_s + lasts_s:
        body = json.dumps({"model": "", "prompt": "a" * (1 + len(used) % 7), "max_tokens": 1 + len(used) % 3})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status == 200:
            given.append((host, time.monotonic() - began_s))
            used.append(json.loads(said)["usage"])
        elif answer.status != 429 or not answer.headers["retry-after"]:
            odd.append(answer.status)
        else:
            time.sleep(0.05)
takers = [threading.Thread(target=take, args=(host,)) for host in hosts * 4]
for taker in takers:
    taker.start()
for taker in takers:
    taker.join()
tokens = {name: sum(each[name] for each in used) for name in ("prompt_tokens", "completion_tokens")}
print(json.dumps({"given": given, "odd": odd, "used": [len(used), *tokens.values()]}))
"""
# Runs in a router; prints how many requests its log has, and their tokens.
LOGGED: Final = """
import json, pathlib
lines = [json.loads(line) for line in pathlib.Path("/usage/usage.jsonl").read_text().splitlines()]
assert {(line["tenant"], line["outcome"]) for line in lines} == {("limited", "ok")}
print(json.dumps([sum(line[name] for line in lines) for name in ("requests", "prompt_tokens", "output_tokens")]))
"""

pytestmark = pytest.mark.thorough


class Given(NamedTuple):
    by_router: dict[str, int]
    times_s: list[float]
    odd: list[int]
    used: list[int]  # requests, prompt tokens, output tokens, as clients were told

    def until(self, seconds: float) -> int:
        return sum(each <= seconds for each in self.times_s)


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *KEY_LIMITS)


def take_all(release: Release) -> Given:
    hosts = [pod["status"]["podIP"] for pod in release.pods(ROUTERS)]
    assert len(hosts) == 2
    command = ("exec", f"deployment/{ROUTERS}", "--", "python", "-c", TAKE_ALL, str(LASTS_S), KEY, *hosts)
    said = json.loads(release.cluster.kubectl(*command))
    by_router = {host: sum(each == host for each, _ in said["given"]) for host in hosts}
    return Given(by_router, [when_s for _, when_s in said["given"]], said["odd"], said["used"])


def logged(release: Release) -> list[int]:
    """Return what the logs of both routers have together, as `Given.used`."""
    names = [pod["metadata"]["name"] for pod in release.pods(ROUTERS)]
    found = [json.loads(release.cluster.kubectl("exec", name, "--", "python", "-c", LOGGED)) for name in names]
    return [sum(each) for each in zip(*found, strict=True)]


def test_installing_with_keys_of_our_own(release: Release, cluster: Cluster) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    limits = f'[limited]\nsha256 = "{digest}"\nrequests_per_minute = {PER_MINUTE}\n'
    metadata = {"name": "e2e-keys"}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"keys.toml": limits}})
    release.install()


def test_two_routers_give_a_key_what_one_may_but_for_what_they_have_not_heard(
    release: Release, request: pytest.FixtureRequest
) -> None:
    began_s = time.monotonic()
    given = take_all(release)
    per_s = PER_MINUTE / 60
    rightly = PER_MINUTE + per_s * LASTS_S  # the allowance, and what refills
    told = {"seconds": round(time.monotonic() - began_s), "by_router": given.by_router, "rightly": rightly}
    seconds = {"first_5_s": given.until(5), "first_30_s": given.until(30)}
    print("\n     ", json.dumps({**told, **seconds, "used": given.used}), flush=True)
    assert given.odd == []
    assert min(given.by_router.values()) > 0, "both were asked, and gave"
    assert all(given.until(second) <= 2 * PER_MINUTE + per_s * (second + HEARD_S) for second in range(LASTS_S))
    canary.wait_until(lambda: logged(release) == given.used, "the logs have other tokens than clients were told of")
    assert 0.9 * rightly <= len(given.times_s) <= rightly + per_s * HEARD_S * 2, "what was too much was made up for"


def test_uninstalling(release: Release) -> None:
    release.uninstall()
