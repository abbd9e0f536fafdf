"""Components that know each other by certificate and token, and a token that is replaced while they serve."""

from __future__ import annotations

import base64
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import DEPLOYMENTS, NAME, TRUSTING, Release

SECRET: Final = f"{NAME}-diptych-token"
# Runs in each pod until the mounted secret has become what it should be.
WAIT_UNTIL_MOUNTED: Final = """
import pathlib, sys, time
deadline_s = time.monotonic() + 180
while pathlib.Path("/etc/diptych/auth/token").read_text().split() != sys.argv[1:]:
    assert time.monotonic() < deadline_s, "the secret has not come"
    time.sleep(1)
"""

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *TRUSTING)


def token(cluster: Cluster) -> str:
    [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == SECRET]
    return base64.b64decode(found["data"]["token"]).decode().strip()


def distribute(release: Release, *lines: str) -> None:
    """Write the secret, and wait until every pod sees it."""
    data = {"stringData": {"token": "\n".join(lines) + "\n"}}
    release.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, **data})

    def wait(pod: dict[str, Any]) -> None:
        release.cluster.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", WAIT_UNTIL_MOUNTED, *lines)

    with ThreadPoolExecutor() as pool:
        list(pool.map(wait, release.all_pods()))


def test_installing_with_a_certificate_leads_to_answers_and_moves_pages(release: Release) -> None:
    release.install()
    assert "HTTP and gRPC agree" in release.test("answers")
    assert "GB/s" in release.test("kv")


def test_a_token_is_replaced_without_a_restart_and_without_a_failed_request(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    old, new = token(cluster), secrets.token_hex(32)
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    with watched() as window:
        for lines in ((old, new), (new, old), (new,)):
            distribute(release, *lines)
    assert {pod["metadata"]["name"] for pod in release.all_pods()} == before
    assert window.answered > 0
    assert (window.failed, window.wrong, window.tried_again) == (0, 0, 0), window.problems


def test_whoever_comes_with_the_new_token_is_let_in(release: Release, watched: Watch) -> None:
    with watched() as window:
        for deployment in DEPLOYMENTS:
            release.delete_pod(deployment)
    assert (window.failed, window.wrong, window.tried_again) == (0, 0, 0), window.problems


def test_an_upgrade_keeps_the_token(release: Release, cluster: Cluster) -> None:
    before = token(cluster)
    release.upgrade()
    assert token(cluster) == before
