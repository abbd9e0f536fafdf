"""Nobody may do more than its work needs: pods, accounts, networks, secrets."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from typing import Any

import chart
import pytest
from chart import Objects, objects

from diptych.common.trust.tokens import Tokens
from diptych.common.verdicts.permissions import Party

OURS = [scenario for scenario in chart.SCENARIOS if scenario != "everything"]  # that has containers of others


def containers(found: Objects) -> list[dict[str, Any]]:
    pods = [each["spec"] for each in found.pods().values()]
    return [container for pod in pods for container in (*pod["containers"], *pod.get("initContainers", []))]


@pytest.mark.parametrize("scenario", OURS)
def test_every_pod_keeps_to_the_restricted_profile_but_for_rdma(scenario: str) -> None:
    found = objects(scenario=scenario)
    for name, pod in found.pods().items():
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod["spec"])
    for container in containers(found):
        security = container["securityContext"]
        assert security["capabilities"].get("add", []) == (
            ["IPC_LOCK"] if scenario in ("rdma", "nodes") and container["name"] == "worker" else []
        )
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": security["capabilities"],
        }
        assert security["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("scenario", OURS)
def test_no_pod_has_access_to_the_kubernetes_api_but_the_helper(scenario: str) -> None:
    pods = objects(scenario=scenario).pods()
    allowed = {name for name, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]}
    assert allowed == {"hpa": {"r-diptych-deletion-costs"}, "planner": {"r-diptych-planner"}}.get(scenario, set())


def test_the_helper_lists_and_patches_pods_of_its_namespace_and_nothing_else() -> None:
    found = objects(scenario="hpa")
    (role,) = found.of_kind("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}]
    assert not found.of_kind("ClusterRole")
    (binding,) = found.of_kind("RoleBinding")
    account = found.pods()["r-diptych-deletion-costs"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "ns"}]


LISTED = {"": "pods", "apps": "deployments", "autoscaling": "horizontalpodautoscalers", "keda.sh": "scaledobjects"}


@pytest.mark.parametrize("acts", [False, True])
def test_the_planner_lists_what_is_there_and_scales_the_pools_of_its_release_if_it_acts(acts: bool) -> None:
    found = objects(f"planner: {{act: {str(acts).lower()}}}", scenario="planner")
    (role,) = found.of_kind("Role")
    listed = [{"apiGroups": [group], "resources": [kind], "verbs": ["list"]} for group, kind in LISTED.items()]
    scale = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["patch"]}
    pools = {"resourceNames": ["r-diptych-prefill", "r-diptych-decode"]}
    assert role["rules"] == [*listed, *([scale | pools] if acts else [])]
    assert not found.of_kind("ClusterRole")
    (binding,) = found.of_kind("RoleBinding")
    account = found.pods()["r-diptych-planner"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "ns"}]
    assert token_files(found)["r-diptych-planner"] == {"operator" if acts else "viewer"}


@pytest.mark.parametrize(
    ("scaled", "left"),
    [
        ("decode: {pools: [{name: default, autoscaling: {hpa: {enabled: true}}}]}", [["r-diptych-prefill"]]),
        ("workers: {autoscaling: {hpa: {enabled: true}}}", []),
    ],
)
def test_the_planner_may_not_scale_what_an_autoscaler_of_the_chart_does(scaled: str, left: list[list[str]]) -> None:
    role = objects(scaled, scenario="planner")["Role/r-diptych-planner"]
    names = [each["resourceNames"] for each in role["rules"] if each["resources"] == ["deployments/scale"]]
    assert names == left


@pytest.mark.parametrize(
    ("target", "port", "is_open"),
    [
        ("router", "http", True),
        ("router", "health", True),
        ("router", "any other", False),
        ("bootstrap", "grpc", True),
        ("worker", "grpc", True),
        ("worker", "metrics", False),
    ],
)
def test_the_planner_reaches_what_it_asks_and_nobody_reaches_it(target: str, port: str, is_open: bool) -> None:
    found = objects(scenario="planner")
    pods = {name: pod["metadata"]["labels"] for name, pod in found.pods().items()}
    assert is_allowed(found, target, pods["r-diptych-planner"], port) is is_open
    assert not any(is_allowed(found, "planner", labels, "metrics") for labels in ({}, *pods.values()))


def test_where_egress_is_restricted_the_planner_reaches_the_kubernetes_api() -> None:
    found = objects("networkPolicy: {egress: {enabled: true}}", scenario="planner")
    api = {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}
    assert [api in policy(found, each)["egress"] for each in ("planner", "router", "worker")] == [True, False, False]


def test_routers_that_check_pods_list_endpoint_slices_of_a_service_of_all_workers_and_nothing_else() -> None:
    found = objects("router: {checkPods: true}")
    assert found["Role/r-diptych-pod-check"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
    ]
    uses_api = {name for name, pod in found.pods().items() if pod["spec"]["automountServiceAccountToken"]}
    assert uses_api == {"r-diptych-router"}
    (container,) = found.pods()["r-diptych-router"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["DIPTYCH_ENDPOINT_SLICES"] == "kubernetes.io/service-name=r-diptych-workers"
    selector = found["Service/r-diptych-workers"]["spec"]["selector"]
    for name, pod in found.pods().items():
        labels = pod["metadata"]["labels"]
        assert (selector.items() <= labels.items()) == ("prefill" in name or "decode" in name)


@pytest.mark.parametrize("scenario", chart.SCENARIOS)
def test_every_pod_has_an_account_that_is_made(scenario: str) -> None:
    found = objects(scenario=scenario)
    accounts = {pod["spec"]["serviceAccountName"] for pod in found.pods().values()}
    made = {each["metadata"]["name"] for each in found.of_kind("ServiceAccount")}
    assert made == accounts if scenario != "existing-secrets" else accounts == {"default", "llm-workers"}


def policy(found: Objects, component: str) -> dict[str, Any]:
    spec: dict[str, Any] = found[f"NetworkPolicy/r-diptych-{component}"]["spec"]
    return spec


def is_allowed(found: Objects, component: str, source: dict[str, str], port: str) -> bool:
    """Whether a pod of this release with these labels may reach a port, named or not."""

    def matches(peer: dict[str, Any]) -> bool:
        selector = peer.get("podSelector")
        if selector is None or "namespaceSelector" in peer:
            return False
        wanted = selector.get("matchExpressions", [])
        labels = selector["matchLabels"].items() <= source.items()
        return labels and all(source[each["key"]] in each["values"] for each in wanted)

    def opens(rule: dict[str, Any]) -> bool:
        ports = [each["port"] for each in rule.get("ports", [])]
        return (not ports or port in ports) and ("from" not in rule or any(map(matches, rule["from"])))

    return any(map(opens, policy(found, component)["ingress"]))


@pytest.mark.parametrize(
    ("source", "target", "port", "is_open"),
    [
        ("client", "router", "http", False),  # unless named
        ("client", "router", "grpc", False),
        ("r-diptych-test-answers", "router", "http", True),
        ("r-diptych-router", "router", "http", True),  # `diptych status`
        ("r-diptych-router", "router", "34567", True),  # of one of its processes: consoles ask each
        ("r-diptych-test-answers", "router", "34567", False),
        ("r-diptych-prefill", "router", "http", False),
        ("client", "router", "health", False),  # nor metrics
        ("client", "r-diptych-decode", "grpc", False),
        ("client", "bootstrap", "grpc", False),
        ("r-diptych-router", "worker", "grpc", True),
        ("r-diptych-router", "worker", "metrics", False),
        ("r-diptych-router", "worker", "any other", False),
        ("r-diptych-prefill", "worker", "any other", True),
        ("r-diptych-prefill", "bootstrap", "grpc", True),
        ("r-diptych-router", "bootstrap", "grpc", True),
        ("r-diptych-prefill", "bootstrap", "health", False),
        ("r-diptych-test-kv", "worker", "grpc", True),
        ("r-diptych-test-kv", "bootstrap", "grpc", True),
        ("r-diptych-test-kv", "worker", "any other", False),
        ("r-diptych-bootstrap", "worker", "grpc", False),
        ("r-diptych-deletion-costs", "worker", "grpc", False),
        ("r-diptych-deletion-costs", "bootstrap", "grpc", True),
        ("r-diptych-bootstrap", "bootstrap", "grpc", False),
    ],
)
def test_networks_are_open_for_whom_they_are_needed(source: str, target: str, port: str, is_open: bool) -> None:
    found = objects("deletionCosts: {enabled: true}")
    component = "worker" if target.startswith("r-") else target
    labels = {} if source == "client" else found.pods()[source]["metadata"]["labels"]
    assert is_allowed(found, component, labels, port) is is_open


def test_every_policy_selects_pods_and_names_ports_that_they_have() -> None:
    found = objects(scenario="tls")
    for each in found.of_kind("NetworkPolicy"):
        wanted = each["spec"]["podSelector"]["matchLabels"].items()
        pods = [pod for pod in found.pods().values() if wanted <= pod["metadata"]["labels"].items()]
        assert pods
        named = {port["port"] for rule in each["spec"]["ingress"] for port in rule.get("ports", [])}
        for pod in pods:
            assert named <= {port["name"] for port in pod["spec"]["containers"][0]["ports"]}


def test_everybody_reaches_the_api_where_it_is_said_to_be_open_and_nothing_else_of_a_router() -> None:
    found = objects("networkPolicy: {open: true}")
    assert [is_allowed(found, "router", {}, port) for port in ("http", "grpc", "health")] == [True, True, False]


def test_metrics_and_probes_are_reached_from_the_named_namespaces_alone() -> None:
    found = objects("networkPolicy: {open: true, prometheus: [{namespaceSelector: {matchLabels: {team: sre}}}]}")
    for component, port in (("router", "health"), ("worker", "metrics"), ("bootstrap", "health")):
        rules = [
            rule for rule in policy(found, component)["ingress"] if port in [p["port"] for p in rule.get("ports", [])]
        ]
        assert [rule["from"] for rule in rules] == [[{"namespaceSelector": {"matchLabels": {"team": "sre"}}}]]


def test_named_clients_and_the_release_itself_reach_routers_and_nobody_else() -> None:
    found = objects(scenario="tls")
    assert not is_allowed(found, "router", {}, "http")
    pods = {name: pod["metadata"]["labels"] for name, pod in found.pods().items()}
    reach = {name for name, labels in pods.items() if is_allowed(found, "router", labels, "http")}
    assert reach == {"r-diptych-router", "r-diptych-test-answers", "r-diptych-test-kv"}
    gateways = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}
    assert gateways in policy(found, "router")["ingress"][0]["from"]
    assert policy(found, "worker")["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("host", ["collector", "[fd00::1]"])
def test_where_egress_is_restricted_routers_reach_the_collectors_port_and_nobody_else_does(host: str) -> None:
    found = objects(f'{{networkPolicy: {{egress: {{enabled: true}}}}, tracing: {{endpoint: "http://{host}:4318"}}}}')
    collector = {"ports": [{"protocol": "TCP", "port": 4318}]}
    components = ("router", "worker", "bootstrap")
    assert [collector in policy(found, each)["egress"] for each in components] == [True, False, False]


def test_users_and_groups_may_be_left_to_the_cluster() -> None:
    names = ("runAsUser", "runAsGroup", "fsGroup")
    none = objects(f"podSecurity: {{{', '.join(f'{name}: null' for name in names)}}}", scenario="everything")
    for pods, given in ((none.pods(), set()), (objects(scenario="everything").pods(), set(names))):
        for name, pod in pods.items():
            security = pod["spec"]["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security.keys() & set(names) == given, name


def secret(found: Objects, name: str) -> dict[str, str]:
    data = found[f"Secret/r-diptych-{name}"]["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_secrets_that_the_chart_makes_are_kept_and_fit_together() -> None:
    found = objects("auth: {tls: {enabled: true}}")
    for each in found.of_kind("Secret"):
        annotations = each["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade", "no release holds it"
        assert annotations["helm.sh/resource-policy"] == "keep"
    tokens = {name: Tokens.of_variable(text) for name, text in secret(found, "token").items()}
    assert tokens.keys() == {"bootstrap", *(party.value for party in Party)}
    for party in Party:
        sent = tokens[party.value].authorization()
        assert {name: each.parties(sent) for name, each in tokens.items()} == dict.fromkeys(tokens, frozenset({party}))
    assert tokens["bootstrap"].authorization() is None
    keys = secret(found, "api-keys")
    assert tomllib.loads(keys["keys.toml"]) == {"default": {"sha256": hashlib.sha256(keys["key"].encode()).hexdigest()}}


def test_the_certificate_that_the_chart_makes_is_one_that_members_can_use(tmp_path: Any) -> None:
    from diptych.common.trust.tls import Tls, TlsFiles

    files = secret(objects("auth: {tls: {enabled: true, name: our-name}}"), "tls")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    Tls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt", "our-name")).current()


def token_files(found: Objects) -> dict[str, set[str]]:
    """Which keys of the secret of tokens each pod mounts, all as the one file that it reads."""
    mounted = {}
    for name, pod in found.pods().items():
        (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "auth"]
        assert {each["path"] for each in volume["secret"]["items"]} == {"token"}
        mounted[name] = {each["key"] for each in volume["secret"]["items"]}
    return mounted


def test_each_pod_has_the_token_of_what_it_is_and_no_other() -> None:
    values = "{deletionCosts: {enabled: true}%s}"
    own = "auth: {token: {existingSecret: mine, perMember: %s}}"
    expected = {
        "r-diptych-bootstrap": {"bootstrap"},
        "r-diptych-prefill": {"worker"},
        "r-diptych-decode": {"worker"},
        "r-diptych-router": {"router"},
        "r-diptych-deletion-costs": {"viewer"},
        "r-diptych-test-answers": {"viewer"},
        "r-diptych-test-kv": {"viewer"},
    }
    assert token_files(objects(values % "")) == expected
    assert token_files(objects(values % f", {own % 'true'}")) == expected
    assert token_files(objects(values % f", {own % 'false'}")) == {name: {"token"} for name in expected}


def test_no_secret_is_in_a_command_line_or_an_environment() -> None:
    found = objects("auth: {tls: {enabled: true}}")
    tokens, key = secret(found, "token"), secret(found, "api-keys")["key"]
    pods = str(found.pods())
    assert not [text for text in tokens.values() if text.splitlines()[0].rpartition(":")[2] in pods]
    assert key not in pods


def test_existing_secrets_are_mounted_and_none_is_made() -> None:
    found = objects(scenario="existing-secrets")
    assert not found.of_kind("Secret")
    volumes = found.pods()["r-diptych-router"]["spec"]["volumes"]
    names = {each["secret"]["secretName"] for each in volumes if "secret" in each}
    assert names == {"diptych-token", "diptych-tls", "diptych-api-keys"}


def test_cert_manager_makes_what_is_mounted() -> None:
    found = objects(scenario="everything")
    (certificate,) = found.of_kind("Certificate")
    assert certificate["spec"]["dnsNames"] == ["diptych"]
    volumes = found.pods()["r-llm-router"]["spec"]["volumes"]
    assert certificate["spec"]["secretName"] in str(volumes)
