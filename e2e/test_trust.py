"""Components that know each other by certificate and token: rotated, undone and done again under long streams.

Whatever Helm undoes, a token that was withdrawn stays withdrawn, in a secret of the chart's as in one of our own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE, NEXT_IMAGE, Watch
from release import NAME, TRUSTING, Release
from traffic import LONG, Traffic, assert_harmless_to_long_streams

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
TO_OURS: Final = "--set=auth.token.existingSecret=our-token,auth.token.perMember=true,apiKeys.existingSecret=our-keys"
ANEW: Final = "--set=log.level=debug"

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *TRUSTING)


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    traffic = Traffic(cluster, "traffic", LONG)
    traffic.start(IMAGE)
    yield traffic
    traffic.stop()


@pytest.fixture(scope="module")
def _ours(release: Release, cluster: Cluster) -> None:
    """Secrets of our own, which hold what those of the chart do."""
    for theirs, ours in OURS.items():
        [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == theirs]
        cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": ours}, "data": found["data"]})


def data_of(cluster: Cluster, secret: str) -> dict[str, str]:
    """What is in the file of each kind of member."""
    [found] = [each for each in cluster.get("secrets") if each["metadata"]["name"] == secret]
    return {name: base64.b64decode(text).decode() for name, text in found["data"].items()}


def secrets_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in pod["spec"]["volumes"] if "secret" in each]


def mounted(release: Release) -> set[str]:
    return {each["secret"]["secretName"] for pod in release.all_pods() for each in secrets_of(pod)}


def distribute(release: Release, secret: str, *sets: Mapping[str, str]) -> None:
    """Write the secret, what each file holds of each set, and wait until every pod sees it."""
    files = {name: "".join(each[name] for each in sets) for name in sets[0]}
    metadata = {"name": secret}
    release.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": files})

    def wait(pod: dict[str, Any]) -> None:
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        expected = files[component if component in COMPONENTS else "viewer"]
        release.cluster.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", WAIT_UNTIL_MOUNTED, expected)

    with ThreadPoolExecutor() as pool:
        list(pool.map(wait, release.all_pods()))


def rotate(release: Release, secret: str) -> dict[str, str]:
    """Replace what is in a secret, in the steps of docs/operations/tls.md; return what is new."""
    old, new = data_of(release.cluster, secret), new_token_files()
    before = {pod["metadata"]["name"] for pod in release.all_pods()}
    for sets in ((old, new), (new, old), (new,)):
        distribute(release, secret, *sets)
    assert {pod["metadata"]["name"] for pod in release.all_pods()} == before, "nobody was restarted"
    return new


def do_and_undo(release: Release, *values: str, image: str = IMAGE) -> Iterator[str]:
    """Yield what was done when it is: an upgrade, its rollback, and the rollback of that. Each replaces every pod."""
    steps = {
        "upgraded": lambda: release.upgrade(*values, image=image),
        "rolled back": release.rollback,
        "rolled forth": release.rollback,
    }
    for what, step in steps.items():
        before = {pod["metadata"]["name"] for pod in release.all_pods()}
        step()
        assert before.isdisjoint(pod["metadata"]["name"] for pod in release.all_pods())
        yield what


def test_installing_with_a_certificate_leads_to_answers_and_moves_pages(release: Release) -> None:
    release.install()
    assert "HTTP and gRPC agree" in release.test("answers")
    assert "GB/s" in release.test("kv")


def test_a_token_of_the_charts_is_replaced_without_a_restart(release: Release, watched: Watch) -> None:
    with watched() as window:
        rotate(release, SECRET)
    assert_harmless_to_long_streams(window)


def test_an_upgrade_its_rollback_and_the_rollback_of_that_keep_what_was_rotated(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    """Whoever starts anew comes with the new token, and is let in."""
    rotated = data_of(cluster, SECRET)
    with watched() as window:
        for what in do_and_undo(release, ANEW, image=NEXT_IMAGE):
            assert data_of(cluster, SECRET) == rotated, what
    assert_harmless_to_long_streams(window)


@pytest.mark.usefixtures("_ours")
def test_secrets_of_the_charts_own_and_of_ours_replace_each_other(release: Release, watched: Watch) -> None:
    """To secrets of our own, back by a rollback, and there again by the rollback of that."""
    with watched() as window:
        for what in do_and_undo(release, TO_OURS):
            expected = OURS if what == "rolled back" else OURS.values()
            assert mounted(release) == {*expected, f"{NAME}-diptych-tls"}, what
    assert_harmless_to_long_streams(window)


@pytest.mark.usefixtures("_ours")
def test_a_token_of_our_own_is_rotated_and_stays_so_whatever_is_undone(
    release: Release, cluster: Cluster, watched: Watch
) -> None:
    ours, theirs = OURS[SECRET], data_of(cluster, SECRET)
    release.upgrade(TO_OURS)  # nothing is replaced where the test before this one has run
    with watched() as window:
        rotated = rotate(release, ours)
        for what in do_and_undo(release, TO_OURS, ANEW):
            assert data_of(cluster, ours) == rotated, what
            assert mounted(release) == {*OURS.values(), f"{NAME}-diptych-tls"}, what
    assert_harmless_to_long_streams(window)
    assert data_of(cluster, SECRET) == theirs, "who goes back needs it"


def test_uninstalling_leaves_the_secrets_that_the_release_used(
    release: Release, cluster: Cluster, traffic: Traffic
) -> None:
    traffic.stop()
    release.uninstall()
    assert release.all_pods() == []
    assert {*OURS, *OURS.values()} <= {each["metadata"]["name"] for each in cluster.get("secrets")}
