"""Secrets that the chart makes once: what a later `helm upgrade` does with those that are in the cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import chart
import pytest
import yaml
from http_serving import serving
from secrets_server import Secret, SecretsServer

OWNED = {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "ns"}  # as Helm notes it
TLS = "auth: {tls: {enabled: true, name: %s}}"


@pytest.fixture
def cluster() -> Iterator[SecretsServer]:
    with serving(SecretsServer()) as server:
        yield server


def upgrade(cluster: SecretsServer, values: str) -> subprocess.CompletedProcess[str]:
    options = ("--dry-run=server", "--disable-openapi-validation", f"--kube-apiserver={cluster.url}", "--namespace=ns")
    return chart.run.__wrapped__(  # of now, whatever was rendered before
        "template", "r", str(chart.CHART), *options, values=values
    )


def installed(cluster: SecretsServer, values: str) -> dict[str, Secret]:
    """Render, and have the cluster keep the secrets; return them by name."""
    rendered = upgrade(cluster, values)
    assert rendered.returncode == 0, rendered.stderr
    objects = [each for each in yaml.safe_load_all(rendered.stdout) if each and each["kind"] == "Secret"]
    for each in objects:
        each["metadata"]["annotations"] |= OWNED
    cluster.secrets = {each["metadata"]["name"]: each for each in objects}
    return {name: each["data"] for name, each in cluster.secrets.items()}


def test_an_upgrade_takes_the_secrets_that_are_there(cluster: SecretsServer) -> None:
    made = installed(cluster, TLS % "ours")
    assert set(made) == {"r-diptych-token", "r-diptych-api-keys", "r-diptych-tls"}
    assert installed(cluster, TLS % "ours") == made


def test_without_a_cluster_to_ask_each_rendering_has_secrets_of_its_own(cluster: SecretsServer) -> None:
    made = installed(cluster, TLS % "ours")
    cluster.secrets = {}
    assert installed(cluster, TLS % "ours") != made


@pytest.mark.parametrize("name", ["another", "our", "ours.example"])
def test_a_certificate_for_another_name_is_not_taken_for_this_one(cluster: SecretsServer, name: str) -> None:
    installed(cluster, TLS % "ours")
    refused = upgrade(cluster, TLS % name)
    assert refused.returncode != 0
    assert f"auth.tls.name is {name}, but the certificate in secret r-diptych-tls" in refused.stderr
    assert "kubectl -n ns delete secret r-diptych-tls" in refused.stderr


def test_a_secret_of_ones_own_may_be_for_any_name(cluster: SecretsServer) -> None:
    installed(cluster, TLS % "ours")
    assert upgrade(cluster, "auth: {tls: {enabled: true, name: other, existingSecret: r-diptych-tls}}").returncode == 0
