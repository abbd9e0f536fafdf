"""Components that know each other by certificate and token, and a token that is replaced while they serve."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE, Watch
from release import DEPLOYMENTS, NAME, TRUSTING, Release
from traffic import assert_harmless

from diptych.common.trust.token_files import new_token_files

SECRET: Final = f"{NAME}-diptych-token"
COMPONENTS: Final = ("bootstrap", "worker", "router")  # others only look
# Runs in each pod until the mounted secret has become what it should be.
WAIT_UNTIL_MOUNTED: Final = """
import pathlib, sys, time
deadline_s = time.monotonic() + 180
while pathlib.Path("/etc/diptych/auth/token").read_text() != sys.argv[1]:
    assert time.monotonic() < deadline_s, "the secret has not come"
    time.sleep(1)
"""

OURS: Final = {SECRET: "our-token", f"{NAME}-diptych-api-keys": "our-keys"}

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *TRUSTING)


def tokens(cluster: Cluster) -> dict[str, str]:
    """What is in the file of each kind of member."""
    [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == SECRET]
    return {name: base64.b64decode(text).decode() for name, text in found["data"].items()}


def secrets_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in pod["spec"]["volumes"] if "secret" in each]


def distribute(release: Release, *sets: Mapping[str, str]) -> None:
    """Write the secret, what each file holds of each set, and wait until every pod sees it."""
    files = {name: "".join(each[name] for each in sets) for name in sets[0]}
    metadata = {"name": SECRET}
    release.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": files})

    def wait(pod: dict[str, Any]) -> None:
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        expected = files[component if component in COMPONENTS else "viewer"]
        release.cluster.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", WAIT_UNTIL_MOUNTED, expected)

    with ThreadPoolExecutor() as pool:
        list(pool.map(wait, release.all_pods()))


def test_installing_with_a_certificate_leads_to_answers_and_moves_pages(release: Release) -> None:
    release.install()
    assert "HTTP and gRPC agree" in release.test("answers")
    assert "GB/s" in release.test("kv")


def test_a_token_is_replaced_without_a_restart_and_without_a_failed_request(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    old, new = tokens(cluster), new_token_files()
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    with watched() as window:
        for sets in ((old, new), (new, old), (new,)):
            distribute(release, *sets)
    assert {pod["metadata"]["name"] for pod in release.all_pods()} == before
    assert window.answered > 0
    assert (window.failed, window.wrong, window.tried_again) == (0, 0, 0), window.problems


def test_whoever_comes_with_the_new_token_is_let_in(release: Release, watched: Watch) -> None:
    with watched() as window:
        for deployment in DEPLOYMENTS:
            release.delete_pod(deployment)
    assert (window.failed, window.wrong, window.tried_again) == (0, 0, 0), window.problems


def test_an_upgrade_its_rollback_and_the_rollback_of_that_keep_the_token(release: Release, cluster: Cluster) -> None:
    """Secrets are in no revision: whatever Helm undoes, a token that was withdrawn stays withdrawn."""
    before = tokens(cluster)
    for operation in (release.upgrade, release.rollback, release.rollback):
        operation()
        assert tokens(cluster) == before


def test_secrets_of_the_charts_own_and_of_ours_replace_each_other_without_a_failed_request(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    """To secrets of our own, back by a rollback, and there again by the rollback of that."""
    for theirs, ours in OURS.items():
        [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == theirs]
        cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": ours}, "data": found["data"]})
    with watched() as window:
        release.upgrade(
            "--set=auth.token.existingSecret=our-token,auth.token.perMember=true,apiKeys.existingSecret=our-keys"
        )
        for is_ours in (False, True):
            release.rollback()
            mounted = {each["secret"]["secretName"] for pod in release.all_pods() for each in secrets_of(pod)}
            assert mounted == {*(OURS.values() if is_ours else OURS), f"{NAME}-diptych-tls"}
    assert_harmless(window)
