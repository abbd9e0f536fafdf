"""Secrets that the chart makes once: what Helm does with those that are in the cluster."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator

import chart
import pytest
from http_serving import serving
from objects_server import ObjectsServer

from diptych.common.trust.tokens import Tokens
from diptych.common.verdicts.permissions import EVERY, Party

Data = dict[str, str]

TLS = "auth: {tls: {enabled: true, name: %s}}"
NAMES = ("r-diptych-token", "r-diptych-api-keys", "r-diptych-tls")
OWN = """
auth: {token: {existingSecret: mine}, tls: {enabled: true, existingSecret: mine}}
apiKeys: {existingSecret: mine}
"""


@pytest.fixture
def cluster() -> Iterator[ObjectsServer]:
    with serving(ObjectsServer()) as server:
        yield server


def helm(cluster: ObjectsServer, *arguments: str, values: str = "{}") -> subprocess.CompletedProcess[str]:
    line = [chart.helm() or "helm", *arguments, f"--kube-apiserver={cluster.url}", "--namespace=ns"]
    return subprocess.run(line, input=values, capture_output=True, text=True, timeout=60, check=False)


def upgrade(cluster: ObjectsServer, values: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Install, or upgrade what is installed."""
    line = (
        "upgrade",
        "r",
        str(chart.CHART),
        "--install",
        "--reset-values",
        "--disable-openapi-validation",
        "--values=-",
        *options,
    )
    return helm(cluster, *line, values=values)


def upgraded(cluster: ObjectsServer, values: str, *options: str) -> dict[str, Data]:
    """Return the data of the chart's secrets after it, by name."""
    done = upgrade(cluster, values, *options)
    assert done.returncode == 0, done.stderr
    return kept(cluster)


def rolled_back(cluster: ObjectsServer, *options: str) -> dict[str, Data]:
    done = helm(cluster, "rollback", "r", *options)
    assert done.returncode == 0, done.stderr
    return kept(cluster)


def kept(cluster: ObjectsServer) -> dict[str, Data]:
    paths = (path.rpartition("/")[2] for path in cluster.objects)
    return {name: dict(cluster.secret(name)["data"]) for name in paths if name in NAMES}


def test_an_upgrade_takes_the_secrets_that_are_there(cluster: ObjectsServer) -> None:
    made = upgraded(cluster, TLS % "ours")
    assert set(made) == set(NAMES)
    assert upgraded(cluster, TLS % "ours") == made


@pytest.mark.parametrize("by", ["true", "false"])  # Helm 4 applies at the server, Helm 3 merges by itself
def test_a_rollback_from_secrets_of_ones_own_finds_the_charts(cluster: ObjectsServer, by: str) -> None:
    made = upgraded(cluster, TLS % "ours", f"--server-side={by}")
    assert upgraded(cluster, OWN, f"--server-side={by}") == made, "who goes back needs it"
    assert rolled_back(cluster, f"--server-side={by}") == made
    assert rolled_back(cluster, f"--server-side={by}") == made


@pytest.mark.parametrize("by", ["true", "false"])
def test_what_was_rotated_stays_whatever_is_rolled_back(cluster: ObjectsServer, by: str) -> None:
    upgraded(cluster, TLS % "ours", f"--server-side={by}")
    for name in NAMES[:2]:  # as docs/operations/tls.md has it done
        secret = cluster.secret(name)
        secret["data"] = {key: base64.b64encode(b"rotated").decode() for key in secret["data"]}
    rotated = kept(cluster)
    assert upgraded(cluster, f"{{log: {{level: debug}}, {TLS % 'ours'}}}", f"--server-side={by}") == rotated
    assert rolled_back(cluster, f"--server-side={by}") == rotated
    assert rolled_back(cluster, f"--server-side={by}") == rotated, "back from the rollback"


def test_who_goes_over_to_the_charts_secrets_gets_new_ones(cluster: ObjectsServer) -> None:
    assert upgraded(cluster, OWN) == {}
    made = upgraded(cluster, "")
    assert set(made) == {"r-diptych-token", "r-diptych-api-keys"}
    assert rolled_back(cluster) == made


def test_secrets_stay_when_the_release_goes_and_serve_the_next_one(cluster: ObjectsServer) -> None:
    made = upgraded(cluster, "")
    assert helm(cluster, "uninstall", "r").returncode == 0
    assert [path.rpartition("/")[2] in made for path in cluster.objects] == [True, True], "and nothing else"
    assert upgraded(cluster, "") == made


def test_the_one_token_of_an_older_release_goes_on_beside_those_that_are_made(cluster: ObjectsServer) -> None:
    old = "the-one-token-of-an-older-release"
    data = {"token": base64.b64encode(f"{old}\n".encode()).decode()}
    upgraded(cluster, "")
    cluster.secret("r-diptych-token")["data"] = data
    made = upgraded(cluster, "")["r-diptych-token"]
    assert made["token"] == data["token"], "pods of the older release mount it"
    tokens = {name: Tokens.of_variable(base64.b64decode(made[name]).decode()) for name in made}
    assert {each.authorization() for each in tokens.values()} == {f"Bearer {old}"}, "as long as it is there"
    assert all(each.parties(f"Bearer {old}") == EVERY for each in tokens.values())
    assert upgraded(cluster, "")["r-diptych-token"] == made

    without = {name: base64.b64decode(made[name]).decode().replace(f"{old}\n", "") for name in made.keys() - {"token"}}
    moved = {name: Tokens.of_variable(text) for name, text in without.items()}
    for party in Party:  # the next step: everybody sends its own, which all accept already
        sent = moved[party.value].authorization()
        assert {each.parties(sent) for each in (*moved.values(), tokens["worker"])} == {frozenset({party})}


@pytest.mark.parametrize("name", ["another", "our", "ours.example"])
def test_a_certificate_for_another_name_is_not_taken_for_this_one(cluster: ObjectsServer, name: str) -> None:
    upgraded(cluster, TLS % "ours")
    refused = upgrade(cluster, TLS % name)
    assert refused.returncode != 0
    assert f"auth.tls.name is {name}, but the certificate in secret r-diptych-tls" in refused.stderr
    assert "kubectl -n ns delete secret r-diptych-tls" in refused.stderr


def test_a_secret_of_ones_own_may_be_for_any_name(cluster: ObjectsServer) -> None:
    upgraded(cluster, TLS % "ours")
    assert upgrade(cluster, "auth: {tls: {enabled: true, name: other, existingSecret: r-diptych-tls}}").returncode == 0


def test_what_is_only_rendered_has_the_secrets_too_new_ones_each_time() -> None:
    first = chart.objects(TLS % "ours")
    assert {each["metadata"]["name"] for each in first.of_kind("Secret")} == set(NAMES)
    second = chart.run.__wrapped__("template", "r", str(chart.CHART), "--namespace=ns", values=TLS % "ours").stdout
    assert all(each["data"][key] not in second for each in first.of_kind("Secret") for key in each["data"])
