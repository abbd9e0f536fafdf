"""What docs/operations/troubleshooting.md says is seen, and that what it says helps, helps.

One release: it begins with a pool for each way not to become ready, is healed, and suffers what befalls healthy ones.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections import Counter
from typing import Any, Final

import pytest
from cluster import TIMEOUT_S, Cluster
from conftest import IMAGE
from release import DEPLOYMENTS, NAME, REMEDIED, SELECTOR, TROUBLED, Release

from diptych.engine.sim.known_answers import KnownAnswers

BOOTSTRAP, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
IN_ROUTER: Final = ("exec", f"deployment/{ROUTERS}", "--")
STATUS: Final = (*IN_ROUTER, "diptych", "status")
EVENTS: Final = ("get", "events", "--watch", "--field-selector")
LONG: Final = "Tell me story 198"  # a story of more than 600 tokens, 50 ms each
ASK: Final = f"""
import http.client, sys
connection = http.client.HTTPConnection("{ROUTERS}", 8000)
connection.request("GET", "/v1/models", headers={{"authorization": sys.argv[1]}} if sys.argv[1] else {{}})
print(connection.getresponse().status)
"""

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *TROUBLED)


def make_token(cluster: Cluster, name: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    cluster.apply({**secret, "stringData": {"token": secrets.token_hex(32)}})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "workers.gpu.count=1",
            "(?s)These values can't work:.*gpu.count is 1, but options.device sim uses none: set one",
        ),
        ("router.replica=1", "at '/router': additional properties 'replica' not allowed"),
    ],
)
def test_values_that_cant_work_are_refused_and_nothing_is_installed(
    release: Release, cluster: Cluster, value: str, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        release.submit("install", f"--set={value}")
    assert cluster.get("secrets", "-l", "owner=helm") == []


def test_a_worker_that_no_node_can_take_is_pending_and_says_why(release: Release, cluster: Cluster) -> None:
    make_token(cluster, "own-token")
    make_token(cluster, "other-token")
    release.submit("install")
    line = cluster.see("0/", *EVENTS, "reason=FailedScheduling")
    assert "prefill-unplaced" in line
    assert "node(s) didn't match" in cluster.kubectl("describe", "pods", "-l", "diptych.io/pool=unplaced")


def test_a_worker_whose_start_is_too_long_is_restarted_by_its_probe(cluster: Cluster) -> None:
    assert "prefill-hasty" in cluster.see("failed startup probe, will be restarted", *EVENTS, "reason=Killing")


def test_a_worker_with_too_little_memory_is_killed_for_it(cluster: Cluster) -> None:
    cluster.see("OOMKilled", "get", "pods", "--watch", "-l", "diptych.io/pool=tight")


def test_a_worker_with_another_token_finds_bootstrap_away_and_says_why(cluster: Cluster) -> None:
    line = cluster.see(": away (wrong token", "logs", "--follow", f"deployment/{PREFILL}-stranger")
    assert "bootstrap at " in line
    assert cluster.kubectl("get", "endpoints", BOOTSTRAP, "-o", "jsonpath={.subsets[*].addresses[*].ip}")


def test_a_worker_without_a_peer_is_not_ready_until_the_other_pool_is_up(release: Release, cluster: Cluster) -> None:
    release.wait_for_control()
    cluster.see("not ready: no peer is linked yet", *STATUS, "--watch=1")
    cluster.kubectl("scale", f"deployment/{DECODE}", "--replicas=1")
    cluster.rollout(PREFILL)


def test_what_the_page_says_makes_all_of_them_ready(release: Release, cluster: Cluster) -> None:
    release.upgrade(REMEDIED)
    assert {member["state"] for member in members(cluster)} == {"ready"}


def members(cluster: Cluster) -> list[dict[str, Any]]:
    return list(json.loads(cluster.kubectl(*STATUS, "--json"))["members"])


def test_the_api_takes_the_key_that_the_notes_tell_how_to_get(cluster: Cluster, api_key: str) -> None:
    for header, status in (("", 401), (f"Bearer {api_key}", 200)):
        assert cluster.kubectl(*IN_ROUTER, "python", "-c", ASK, header).split() == [str(status)]


@pytest.fixture
def api_key(cluster: Cluster) -> str:
    command = re.search(r"DIPTYCH_API_KEY=\$\((.*)\)", cluster.helm("get", "notes", NAME))
    assert command is not None
    return subprocess.run(command[1], shell=True, capture_output=True, text=True, check=True).stdout


def test_a_worker_that_drains_for_long_hands_over_when_it_is_hurried(cluster: Cluster, api_key: str) -> None:
    ask = ("diptych", "generate", LONG, "--max-tokens=600", "--temperature=0", f"--api-key={api_key}")
    with cluster.begin(*IN_ROUTER, *ask) as client:
        assert client.stdout is not None
        answer = client.stdout.read(1)
        [pod] = [each["pod"] for each in members(cluster) if each["role"] == "decode" and each["load"]["num_running"]]
        cluster.kubectl("delete", "pod", pod, "--wait=false")
        cluster.see("draining, 1 request left", *STATUS, "--watch=1")
        cluster.see("Terminating", "get", "pod", pod)
        cluster.kubectl(*IN_ROUTER, "diptych", "drain", pod, "--hurry")
        assert client.poll() is None, "the answer was complete before anything was handed over"
        cluster.wait(f"pod/{pod}", "delete")
        answer += client.stdout.read()
    assert answer == KnownAnswers().completion(LONG, 600) + "\n"


def test_draining_a_node_waits_for_the_budget_and_goes_on(release: Release, cluster: Cluster) -> None:
    release.scale(DECODE, len(cluster.get("nodes")) + 1)
    [(node, _)] = Counter(pod["spec"]["nodeName"] for pod in release.pods(DECODE)).most_common(1)
    said = cluster.drain(node, f"{SELECTOR},diptych.io/role=decode")
    assert "would violate the pod's disruption budget" in said
    release.settle(DECODE)


def test_without_bootstrap_a_router_drains_by_sigterm_and_new_pods_wait(release: Release, cluster: Cluster) -> None:
    bootstrap = [f"pod/{name}" for name in names(release, BOOTSTRAP)]
    cluster.kubectl("scale", f"deployment/{BOOTSTRAP}", "--replicas=0")
    cluster.kubectl("wait", "--for=delete", *bootstrap, f"--timeout={TIMEOUT_S}s")
    cluster.see("<none>", "get", "endpoints", BOOTSTRAP, "--watch")
    before = names(release, ROUTERS)
    gone = min(before)
    cluster.kubectl("delete", "pod", gone, "--wait=false")
    assert gone in cluster.see("FailedPreStopHook", *EVENTS, "reason=FailedPreStopHook")
    [new] = names(release, ROUTERS) - before
    cluster.wait(f"pod/{new}", "jsonpath={.status.phase}=Running")
    cluster.see("can't resolve dns:///", "logs", "--follow", new)
    cluster.kubectl("scale", f"deployment/{BOOTSTRAP}", "--replicas=2")
    release.settle()


def names(release: Release, deployment: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in release.pods(deployment)}
