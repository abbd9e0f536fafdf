"""Every scenario of `ci/` is a chart that Helm and the API servers of Kubernetes 1.28 to 1.35 take."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chart
import jsonschema_rs
import pytest
from custom_kinds import SCHEMAS

VERSIONS = tuple(f"1.{minor}" for minor in range(28, 36))
CLAIMS = """
extraObjects:
  - apiVersion: resource.k8s.io/v1
    kind: ResourceClaimTemplate
    metadata: {name: two-gpus, namespace: ns}
    spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]}}}
model: {name: /models/a, volume: {pvc: {claimName: c}}}
decode:
  pools:
    - name: default
      gpu: {count: 2, resource: ""}
      options: {tp: 2, device: cuda}
      podSpec: {runtimeClassName: nvidia, resourceClaims: [{name: gpus, resourceClaimTemplateName: two-gpus}]}
      containerSpec: {resources: {claims: [{name: gpus}]}}
"""
DEFINITIONS = "_definitions.json"


@pytest.mark.parametrize("scenario", chart.SCENARIOS)
def test_helm_finds_nothing_to_say(scenario: str) -> None:
    values = f"--values={chart.CHART / 'ci' / f'{scenario}-values.yaml'}"
    version = f"--kube-version={chart.kube_version(scenario)}"
    found = chart.run("lint", "--strict", "--quiet", str(chart.CHART), version, values)
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr


@functools.cache
def _folder() -> Path:
    """Where the schemas of Kubernetes are; the package's own code would read them again for each object."""
    found = importlib.util.find_spec("kubernetes_validate")
    if found is None or not found.submodule_search_locations:
        pytest.skip("kubernetes-validate is not installed")
    return Path(found.submodule_search_locations[0]) / "kubernetes-json-schema"


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> Any:
    """Strict: a field that this version does not know is an error."""
    return jsonschema_rs.Draft202012Validator(
        SCHEMAS.get(kind) or _schema(version, api_version, kind),
        registry=_registry(version),
        base_uri="json-schema:///",
    )


def _schema(version: str, api_version: str, kind: str) -> Any:
    folder = _folder() / f"v{version}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)  # policy/v1 → policy-v1, as the files are called
    return json.loads((folder / f"{kind.lower()}-{group}.json").read_text())


@functools.cache
def _registry(version: str) -> Any:
    folder = _folder() / f"v{version}.0-local-strict"
    return jsonschema_rs.Registry([(f"json-schema:///{DEFINITIONS}", json.loads((folder / DEFINITIONS).read_text()))])


def _errors(objects: Iterable[chart.Object], version: str) -> list[str]:
    found = []
    for each in objects:
        validator = _validator(version, each["apiVersion"], each["kind"])
        name = f"{each['kind']}/{each['metadata']['name']}"
        found += [f"{name}: {error.instance_path}: {error.message}" for error in validator.iter_errors(each)]
    return found


@pytest.mark.parametrize("scenario", chart.SCENARIOS)
def test_kubernetes_takes_it(scenario: str) -> None:
    versions = VERSIONS[VERSIONS.index(chart.kube_version(scenario)) :]
    if scenario != "everything":
        versions = (versions[0], versions[-1])
    objects = chart.render(scenario=scenario)
    assert {version: _errors(objects, version) for version in versions} == {version: [] for version in versions}


def test_every_kind_that_kubernetes_does_not_know_is_made_by_a_scenario() -> None:
    made = {each["kind"] for scenario in chart.SCENARIOS for each in chart.render(scenario=scenario)}
    assert SCHEMAS.keys() <= made


def test_gpus_that_come_by_claims_are_taken_by_the_first_kubernetes_that_has_them_by_default() -> None:
    objects = chart.render(CLAIMS, kube="1.34")
    assert _errors(objects, "1.34") == []
    assert "ResourceClaimTemplate" in {each["kind"] for each in objects}


@pytest.mark.parametrize("path", sorted((chart.ROOT / "e2e").glob("*.yaml")), ids=lambda path: str(path.stem))
def test_the_chart_takes_the_values_of_the_end_to_end_tests(path: Path) -> None:
    on_cpus = path.stem in ("declared", "devices", "real_model")
    found = chart.template(path.read_text(), scenario="cpu" if on_cpus else "sim")
    assert found.returncode == 0, found.stderr


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    (service, *_) = [each for each in chart.render() if each["kind"] == "Service"]
    service["spec"]["prots"] = service["spec"].pop("ports")
    assert any("prots" in error for error in _errors([service], "1.28"))


@pytest.mark.parametrize(
    ("scenario", "kind"), [("keda", "ScaledObject"), ("tls", "GRPCRoute"), ("nodes", "LeaderWorkerSet")]
)
def test_so_would_one_that_a_custom_kind_does_not_know(scenario: str, kind: str) -> None:
    found = next(each for each in chart.render(scenario=scenario) if each["kind"] == kind)
    found["spec"]["tirggers"] = 1
    assert any("tirggers" in error for error in _errors([found], "1.28"))


def test_rendering_twice_gives_the_same() -> None:
    first = chart.template(scenario="existing-secrets").stdout
    chart.run.cache_clear()
    assert chart.template(scenario="existing-secrets").stdout == first
    assert "kind: Secret" not in first


def test_no_name_and_no_label_is_longer_than_kubernetes_takes() -> None:
    pools = "unified: {pools: [{name: " + "b" * 20 + "}]}"
    for each in chart.render(f"{{fullnameOverride: {'a' * 60}, {pools}}}", scenario="everything"):
        metadata = each["metadata"]
        assert [value for value in (metadata["name"], *metadata.get("labels", {}).values()) if len(value) > 63] == []


def test_long_names_that_begin_alike_stay_apart() -> None:
    def names(text: str) -> set[str]:
        return {each["metadata"]["name"] for each in chart.render(f"fullnameOverride: {text}")}

    west, east = (names(f"customer-facing-production-chat-eu-{side}") for side in ("west", "east"))
    assert not west & east
    assert names("a" * 34) >= {"a" * 34 + "-router"}, "what is short enough stays as it is"


def test_everything_is_in_the_namespace_that_is_asked_for() -> None:
    ours = [each for each in chart.render(scenario="everything") if not each["metadata"]["name"].startswith("extra")]
    assert {each["metadata"]["namespace"] for each in ours} == {"inference"}


@pytest.mark.parametrize("scenario", ["sim", "cpu", "hpa", "tls"])
def test_a_cluster_of_1_20_gets_no_field_that_it_does_not_know(scenario: str) -> None:
    newer = (
        "unhealthyPodEvictionPolicy",
        "resizePolicy",
        "schedulingGates",
        "hostUsers",
        "matchLabelKeys",
        "minDomains",
    )
    text = chart.template(scenario=scenario, kube="1.20").stdout
    assert text
    assert [field for field in newer if field in text] == []
    assert "unhealthyPodEvictionPolicy" in chart.template(scenario=scenario).stdout
