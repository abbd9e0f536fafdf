"""The endpoint picker of a gateway: off, nothing of it is there; on, the route leads to a pool that asks it."""

from __future__ import annotations

from typing import Any

import chart

from diptych.cli.picking.picker import PickerConfig
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


def test_over_tls_it_shows_the_certificate_of_the_secret_and_is_probed_without() -> None:
    open_, closed = container(objects(kube="1.28")), container(objects(", tlsSecret: picker-tls", kube="1.28"))
    assert open_["readinessProbe"]["grpc"] == {"port": 9002, "service": "readiness"}
    assert "grpc" not in closed["readinessProbe"]
    assert "--cert-file=/etc/diptych/picker/tls.crt" in closed["args"]
    assert {"name": "picker-tls", "mountPath": "/etc/diptych/picker", "readOnly": True} in closed["volumeMounts"]
    assert "grpc" not in container(objects(kube="1.20"))["readinessProbe"]


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
