"""The endpoint picker of a gateway: off, nothing of it is there; on, the route leads to a pool that asks it."""

from __future__ import annotations

from typing import Any

import chart

from diptych.cli.picking.picker import END_S, PickerConfig
from diptych.common.config import described

ON = "picker: {enabled: true%s}, gateway: {http: {enabled: true, weight: 3, parentRefs: [{name: g}]}}"
ROUTER, PICKER = "r-diptych-router", "r-diptych-picker"


def objects(more: str = "", kube: str = "") -> chart.Objects:
    return chart.Objects(chart.render("{" + ON % more + "}", kube=kube))


def container(found: chart.Objects) -> dict[str, Any]:
    (only,) = found.pods()[PICKER]["spec"]["containers"]
    return dict(only)


def test_the_route_leads_to_a_pool_of_the_routers_whose_picker_is_asked() -> None:
    found = objects()
    (backend,) = found[f"HTTPRoute/{ROUTER}"]["spec"]["rules"][0]["backendRefs"]
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": ROUTER}
    assert backend == {**pool, "weight": 3}
    spec = found[f"InferencePool/{ROUTER}"]["spec"]
    assert spec["selector"]["matchLabels"] == found[f"Service/{ROUTER}"]["spec"]["selector"]
    ports = {each["containerPort"] for each in found.container(ROUTER)["ports"] if each["name"] == "http"}
    assert {each["number"] for each in spec["targetPorts"]} == ports
    (service,) = found[f"Service/{PICKER}"]["spec"]["ports"]
    picker = {"name": PICKER, "port": {"number": service["port"]}, "failureMode": "FailOpen"}
    assert spec["endpointPickerRef"] == picker


def test_it_is_started_with_options_that_there_are_and_tells_the_port_of_the_pool() -> None:
    options = {name.replace("_", "-") for name, _, _ in described(PickerConfig)}
    flags = dict(each.removeprefix("--").split("=") for each in container(objects())["args"][1:])
    assert flags.keys() <= options
    assert (flags["port"], flags["endpoint-port"]) == ("9002", "8000")


def test_gateways_call_over_tls_unless_told_otherwise_and_probes_come_without() -> None:
    by_itself, given, plain = (
        container(objects(more)) for more in ("", ", tlsSecret: picker-tls", ", plainText: true")
    )
    assert "--cert-file=/etc/diptych/picker/tls.crt" in given["args"]
    assert {"name": "picker-tls", "mountPath": "/etc/diptych/picker", "readOnly": True} in given["volumeMounts"]
    assert "--plain-text" in plain["args"]
    assert not {"--plain-text", "--cert-file=/etc/diptych/picker/tls.crt"} & set(by_itself["args"])
    for each in (by_itself, given, plain):
        assert each["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "health"}
        assert {"name": "health", "containerPort": 8081} in each["ports"]


def test_one_that_is_taken_away_gets_the_time_that_its_streams_may_take() -> None:
    found = objects(", drainSeconds: 90, endpointSeconds: 7")
    flags = dict(each.removeprefix("--").split("=") for each in container(found)["args"][1:])
    assert (flags["linger-s"], flags["drain-s"]) == ("7", "90")
    assert found.pods()[PICKER]["spec"]["terminationGracePeriodSeconds"] >= 90 + 7 + END_S
    budget = found[f"PodDisruptionBudget/{PICKER}"]["spec"]
    assert budget["maxUnavailable"] == 1
    labels = found.pods()[PICKER]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    without = objects(", pdb: {enabled: false}")
    assert f"PodDisruptionBudget/{PICKER}" not in without


def test_it_only_looks_at_members_and_clients_alone_reach_it() -> None:
    found = objects(", tlsSecret: ''}, networkPolicy: {clients: [{podSelector: {matchLabels: {a: gateway}}}]")
    (rule,) = found[f"NetworkPolicy/{PICKER}"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"a": "gateway"}}}]
    (peer, *_) = found["NetworkPolicy/r-diptych-bootstrap"]["spec"]["ingress"][0]["from"]
    assert "picker" in peer["podSelector"]["matchExpressions"][0]["values"]
    (tokens,) = [each for each in found.pods()[PICKER]["spec"]["volumes"] if each["name"] == "auth"]
    assert [each["key"] for each in tokens["secret"]["items"]] == ["viewer"]


def test_off_the_route_leads_to_the_service() -> None:
    found = chart.Objects(chart.render("gateway: {http: {enabled: true, parentRefs: [{name: g}]}}"))
    assert found[f"HTTPRoute/{ROUTER}"]["spec"]["rules"][0]["backendRefs"] == [{"name": ROUTER, "port": 8000}]
    assert not [name for name in found if "picker" in name or "InferencePool" in name]
