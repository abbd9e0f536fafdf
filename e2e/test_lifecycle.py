"""The life of a release, in order, under traffic whose answers are known.

Graceful operations cost no request, and none has to be tried again. Killing a router costs at most what it held.
"""

from __future__ import annotations

import time
from typing import Final

import canary
import pytest
from cluster import Cluster
from conftest import IMAGE, NEXT_IMAGE, Watch
from release import DEPLOYMENTS, NAME, SELECTOR, WAIT, Release
from traffic import USUAL, Traffic, assert_harmless

FIRST_ANSWER_S: Final = 60
NUM_ASKED: Final = 4  # each waits 1.5 s for a pair: together much longer than the probes take to notice
ASK_WITHOUT_WORKERS: Final = f"""
import base64, http.client, sys
def ask(host, method, path, body=None):
    connection = http.client.HTTPConnection(host, 8000)
    key = base64.b64decode(sys.argv[1]).decode()
    connection.request(method, path, body, {{"authorization": "Bearer " + key, "content-type": "application/json"}})
    answer = connection.getresponse()
    answer.read()
    return answer
while ask("localhost", "GET", "/health/ready").status != 503:
    pass
for _ in range({NUM_ASKED}):
    answer = ask("{NAME}-diptych-router", "POST", "/v1/completions", '{{"model": "", "prompt": "a", "max_tokens": 1}}')
    print(answer.status, answer.headers["retry-after"])
"""
BOOTSTRAP, ROUTERS, PREFILL, DECODE = DEPLOYMENTS


def images(release: Release) -> set[str]:
    return {container["image"] for pod in release.all_pods() for container in pod["spec"]["containers"]}


def test_installing_leads_to_answers_over_http_and_grpc_within_a_minute(release: Release) -> None:
    began_s = time.monotonic()
    release.install()
    assert "HTTP and gRPC agree" in release.test("answers")
    assert time.monotonic() - began_s < FIRST_ANSWER_S


def test_helm_test_moves_pages_and_says_how_fast(release: Release) -> None:
    assert "GB/s" in release.test("kv")


def test_an_upgrade_of_image_and_settings_fails_no_request(release: Release, watched: Watch) -> None:
    with watched() as window:
        release.upgrade("--set=log.level=debug", image=NEXT_IMAGE)
    assert images(release) == {NEXT_IMAGE}
    assert_harmless(window)


@pytest.mark.thorough
def test_a_rollback_fails_no_request(release: Release, watched: Watch) -> None:
    with watched() as window:
        release.rollback()
    assert images(release) == {IMAGE}
    assert_harmless(window)


@pytest.mark.thorough
def test_a_pool_beside_the_old_one_gets_its_part_and_is_withdrawn_without_a_failed_request(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    with watched() as window:
        release.submit("upgrade", *WAIT, canary.VALUES)
        canary.wait_until(lambda: canary.served_by(cluster, "next") > 0, "the new pool has served nobody")
        release.rollback()
    assert not [pod for pod in release.all_pods() if "-next-" in pod["metadata"]["name"]]
    assert_harmless(window)


@pytest.mark.parametrize("deployment", [pytest.param(PREFILL, marks=pytest.mark.thorough), DECODE])
def test_scaling_a_pool_from_one_to_three_and_back_fails_no_request(
    release: Release, watched: Watch, deployment: str
) -> None:
    with watched() as window:
        release.scale(deployment, 1, 3, 1, 2)
    assert_harmless(window)


@pytest.mark.thorough
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_deleting_a_pod_fails_no_request(release: Release, watched: Watch, deployment: str) -> None:
    with watched() as window:
        release.delete_pod(deployment)
    assert_harmless(window)


@pytest.mark.thorough
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_killing_a_pod_costs_at_most_what_it_held(release: Release, watched: Watch, deployment: str) -> None:
    with watched() as window:
        release.delete_pod(deployment, "--grace-period=0", "--force")
    assert window.wrong == 0, window.problems
    assert window.failed <= (USUAL.num_clients if deployment == ROUTERS else 0), window.problems


@pytest.mark.thorough
@pytest.mark.parametrize("component", ["bootstrap", "router"])
def test_restarting_the_control_plane_fails_no_request(release: Release, watched: Watch, component: str) -> None:
    with watched() as window:
        release.restart(f"{NAME}-diptych-{component}")
    assert_harmless(window)


def test_draining_nodes_fails_no_request(release: Release, cluster: Cluster, watched: Watch) -> None:
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    with watched() as window:
        for node in sorted({pod["spec"]["nodeName"] for pod in release.all_pods()}):
            cluster.drain(node, SELECTOR)
            release.settle()
    assert before.isdisjoint(pod["metadata"]["name"] for pod in release.all_pods())
    assert_harmless(window)


def test_without_workers_clients_are_told_to_come_again(release: Release, cluster: Cluster, traffic: Traffic) -> None:
    traffic.stop()
    cluster.kubectl("scale", f"deployment/{DECODE}", "--replicas=0")
    key = cluster.kubectl("get", "secret", f"{NAME}-diptych-api-keys", "-o", "jsonpath={.data.key}")
    told = cluster.kubectl("exec", f"deployment/{ROUTERS}", "--", "python", "-c", ASK_WITHOUT_WORKERS, key)
    assert told.splitlines() == ["503 1"] * NUM_ASKED, "a refused connection says nothing of when to come again"


def test_uninstalling_leaves_only_the_secrets_it_names(release: Release, cluster: Cluster, traffic: Traffic) -> None:
    traffic.stop()
    release.uninstall()
    kinds = "deployment,service,configmap,secret,serviceaccount,poddisruptionbudget,networkpolicy,role,rolebinding"
    left = {item["metadata"]["name"] for item in cluster.get(kinds, "-l", f"app.kubernetes.io/instance={NAME}")}
    assert left == {f"{NAME}-diptych-api-keys", f"{NAME}-diptych-token"}
    assert release.all_pods() == []
