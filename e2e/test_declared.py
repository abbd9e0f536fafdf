"""An adapter that values declare, or that is applied, is served by every worker, whoever is restarted or joins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import adapter
import canary
import pytest
from cluster import Cluster
from conftest import Watch
from release import DECLARED, DEPLOYMENTS, NAME, WAIT, Release
from traffic import Kind, Traffic, assert_harmless

IMAGE: Final = os.environ.get("DIPTYCH_E2E_CPU_IMAGE", "")
ADAPTED: Final = Kind(num_clients=4, prompt=(0, 0), output=(8, 8))
DECLARES: Final = "--set=declared.adapters.sql=/adapters/sql"
BOOTSTRAP, ROUTERS, PREFILL, DECODE = DEPLOYMENTS
# Prints what clients can name.
LIST: Final = """
import json, sys, urllib.request
asked = urllib.request.Request("http://localhost:8000/v1/models", headers={"authorization": "Bearer " + sys.argv[1]})
print(json.dumps([each["id"] for each in json.load(urllib.request.urlopen(asked))["data"]]))
"""
# Ends with 0 where `diptych apply` ends as expected.
APPLY: Final = """
import pathlib, subprocess, sys
pathlib.Path("/tmp/declared.toml").write_text(sys.argv[1])
command = ("diptych", "apply", "-f", "/tmp/declared.toml", "--auth-token-file=/dev/stdin")
sys.exit(subprocess.run(command, stderr=subprocess.STDOUT).returncode != int(sys.argv[2]))
"""
APPLIED: Final = '[adapters]\nsql = "/adapters/sql"\n'

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not IMAGE, reason="DIPTYCH_E2E_CPU_IMAGE is not set")]


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *DECLARED)


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", ADAPTED, Path(__file__).with_name("adapters_pod.py"))
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


def models(cluster: Cluster) -> list[str]:
    key = cluster.secret(f"{NAME}-diptych-api-keys", "key")
    return list(json.loads(cluster.kubectl("exec", f"deployment/{ROUTERS}", "--", "python", "-c", LIST, key)))


def test_installing(release: Release, cluster: Cluster) -> None:
    cluster.apply(adapter.config_map("adapters"))
    release.submit("install", *WAIT, DECLARES)


def test_a_declared_adapter_outlives_its_workers_and_bootstrap(release: Release, watched: Watch) -> None:
    with watched() as window:
        release.delete_pod(BOOTSTRAP, "--grace-period=0", "--force")
        release.restart(PREFILL)
        release.restart(DECODE)
    assert_harmless(window)


def test_a_worker_that_joins_later_has_it_and_serves_it_alone(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    old = [pod["metadata"]["name"] for pod in release.pods(DECODE)]
    with watched() as window:
        cluster.kubectl("scale", f"deployment/{DECODE}", "--replicas=3")
        cluster.rollout(DECODE)
        cluster.kubectl("delete", "pod", *old)
        release.settle(DECODE)
        release.scale(DECODE, 2)  # as the values have it
    assert_harmless(window)


def test_what_is_declared_no_more_is_gone_without_a_restart_and_comes_back_by_a_rollback(
    release: Release, cluster: Cluster, traffic: Traffic
) -> None:
    traffic.stop()
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    release.upgrade()
    canary.wait_until(lambda: "sql" not in models(cluster), "it is still there")
    cluster.helm("rollback", NAME)
    canary.wait_until(lambda: "sql" in models(cluster), "it never comes back")
    assert before == {pod["metadata"]["name"] for pod in release.all_pods()}


def applied(cluster: Cluster, text: str, code: int = 0) -> str:
    """Return what `diptych apply` says, which ends with this code."""
    token = cluster.secret(f"{NAME}-diptych-token", "operator")
    command = ("exec", "-i", f"deployment/{ROUTERS}", "--", "python", "-c", APPLY, text, str(code))
    return cluster.kubectl(*command, stdin=token)


def test_apply_names_the_file_that_is_to_be_changed(cluster: Cluster) -> None:
    assert "change the file instead" in applied(cluster, "[adapters]", 1)


def test_what_is_applied_outlives_routers_bootstrap_and_workers(
    release: Release, cluster: Cluster, traffic: Traffic, watched: Watch
) -> None:
    traffic.stop()
    release.upgrade()  # by routers that know what the values have declared
    canary.wait_until(lambda: "sql" not in models(cluster), "it is still there")
    release.upgrade("--set=declared.by=apply")
    assert "adapter sql" in applied(cluster, APPLIED)
    assert "nothing has changed" in applied(cluster, APPLIED)
    traffic.start(IMAGE)
    with watched() as window:
        release.restart(ROUTERS)
        release.delete_pod(BOOTSTRAP, "--grace-period=0", "--force")
        release.restart(PREFILL)
        release.restart(DECODE)
    traffic.stop()
    assert_harmless(window)
    applied(cluster, "[adapters]")
    assert "sql" not in models(cluster)


def test_uninstalling(release: Release) -> None:
    release.uninstall()
