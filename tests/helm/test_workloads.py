"""What the chart makes of values: the things that upgrades, drains and rollouts depend on."""

from __future__ import annotations

from typing import Any

import chart
import promql
import pytest
import yaml
from chart import Objects, objects

from diptych.router.values.declaration import Declaration, parse_declaration

ROUTER, PREFILL, DECODE = "r-diptych-router", "r-diptych-prefill", "r-diptych-decode"


def pool(**values: Any) -> Objects:
    """Render with one decode pool of these values."""
    return objects(yaml.safe_dump({"decode": {"pools": [{"name": "default", **values}]}}))


def deployment(found: Objects, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = found[f"Deployment/{name}"]["spec"]
    return spec


def args(found: Objects, name: str) -> list[str]:
    return list(found.container(name)["args"])


def env(found: Objects, name: str) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in found.container(name)["env"]}


def test_the_defaults_are_a_platform_of_routers_bootstrap_and_a_pool_of_each_role() -> None:
    made = {each["metadata"]["name"]: each["spec"]["replicas"] for each in objects().of_kind("Deployment")}
    assert made == {ROUTER: 2, "r-diptych-bootstrap": 2, PREFILL: 1, DECODE: 1}


def test_what_is_declared_is_read_by_routers_and_a_change_of_it_restarts_nobody() -> None:
    pools = "prefill: {pools: [{name: default}, {name: next, replicas: 0}]}"  # before it has workers, too
    values = f'{pools}\ndeclared: {{adapters: {{"a/b": /x}}, logLevel: debug, pools: {{default: 99.5, next: %s}}}}'
    found = objects(values % 0.5)
    declared = parse_declaration(
        found[f"ConfigMap/{ROUTER.removesuffix('-router')}-declared"]["data"]["declared.toml"], "f"
    )
    assert declared == Declaration({"a/b": "/x"}, {"default": 99.5, "next": 0.5}, "debug")
    assert deployment(found, f"{PREFILL}-next")["replicas"] == 0
    assert "--declared-file=/etc/diptych/declared/declared.toml" in args(found, ROUTER)
    assert deployment(found, ROUTER) == deployment(objects(values % 50), ROUTER)
    assert parse_declaration(objects()["ConfigMap/r-diptych-declared"]["data"]["declared.toml"], "f") == Declaration()


def test_where_it_is_applied_routers_have_no_file_that_refuses_it() -> None:
    assert objects("declared: {by: null}").pods()[ROUTER] == objects().pods()[ROUTER], "as in values of before"
    found = objects("declared: {by: apply}")
    assert [each for each in args(found, ROUTER) if each.startswith("--declared-file")] == []
    assert "ConfigMap/r-diptych-declared" not in found
    named = {each["name"] for each in found.pods()[ROUTER]["spec"]["volumes"]}
    assert "declared" not in named | {each["name"] for each in found.container(ROUTER)["volumeMounts"]}


AT_ZERO = """
router: {options: {coldWaitS: 300}}
workers: {autoscaling: {minReplicas: 0, keda: {enabled: true, serverAddress: a}}}
"""


def test_a_pool_at_zero_is_brought_up_by_requests_alone() -> None:
    found = objects(AT_ZERO)
    scalers = found.of_kind("ScaledObject")
    assert {(each["spec"]["minReplicaCount"], each["spec"]["cooldownPeriod"]) for each in scalers} == {(0, 900)}
    for each in scalers:
        first, *others = [trigger["metadata"] for trigger in each["spec"]["triggers"]]
        assert (first["activationThreshold"], first["threshold"]) == ("0", "1000000")
        assert all(trigger["query"].endswith(" or vector(0)") for trigger in others)
    assert "--cold-wait-s=300" in args(found, ROUTER)


@pytest.mark.parametrize(
    ("running", "offered", "is_active"),
    [
        ((0, 0, 0), (7, 7, 7), False),
        ((0, 0, 1), (7, 7, 7), True),  # one that came before, or waits for workers
        ((0, 0, 0), (7, 7, 8), True),  # one that came and went between two scrapes
        ((), (), False),  # no router tells
    ],
)
def test_a_pool_at_zero_is_kept_for_two_minutes_behind_each_request(
    running: tuple[int, ...], offered: tuple[int, ...], is_active: bool
) -> None:
    here = {"namespace": "ns", "app_kubernetes_io_instance": "r"}
    gauge = frozenset({promql.NAME: "diptych_router_requests_running", **here}.items())
    counter = frozenset({promql.NAME: "diptych_router_offered_total", **here, "tier": "default"}.items())
    scrapes = [
        promql.Scrape(15.0 * number, {gauge: now, counter: count})
        for number, (now, count) in enumerate(zip(running, offered, strict=True))
    ] or [promql.Scrape(0.0, {})]
    for each in objects(AT_ZERO).of_kind("ScaledObject"):
        found = promql.evaluate(each["spec"]["triggers"][0]["metadata"]["query"], scrapes)
        assert isinstance(found, dict)
        assert [value > 0 for value in found.values()] == [is_active]


def test_a_slice_of_a_gpu_is_a_gpu_by_another_name() -> None:
    found = pool(gpu={"count": 1, "resource": "nvidia.com/mig-3g.40gb"}, runtimeClassName="nvidia")
    assert found.container(DECODE)["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"
    assert found.container(DECODE)["image"] == "diptych:0.1.0-cuda"
    spec = deployment(found, DECODE)
    assert (spec["strategy"]["rollingUpdate"]["maxSurge"], spec["template"]["spec"]["runtimeClassName"]) == (
        0,
        "nvidia",
    )


def test_every_role_is_made_by_one_template() -> None:
    pools = "[{name: default, options: {kvCacheMib: 64}}]"
    roles = ("prefill", "decode", "unified", "encode")
    found = objects("{" + ", ".join(f"{role}: {{pools: {pools}}}" for role in roles) + "}")
    texts = {yaml.safe_dump(deployment(found, f"r-diptych-{role}")).replace(role, "ROLE") for role in roles}
    assert len(texts) == 1


def test_a_pool_that_encodes_is_off_by_default_and_scaled_by_how_busy_it_is() -> None:
    assert not objects().get("Deployment/r-diptych-encode")
    found = objects("{workers: {autoscaling: {hpa: {enabled: true}}}, encode: {pools: [{name: default}]}}")
    assert args(found, "r-diptych-encode")[0] == "encode"
    (metric,) = found["HorizontalPodAutoscaler/r-diptych-encode"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "diptych_worker_prefill_busy_ratio"


def test_a_pool_has_the_workers_values_and_its_own_over_them() -> None:
    found = objects(
        "{workers: {options: {pageSize: 32, dp: 2}, nodeSelector: {a: b}},"
        " decode: {pools: [{name: x, replicas: 3, options: {dp: 1}, nodeSelector: {c: d}}]}}"
    )
    spec = deployment(found, "r-diptych-decode-x")
    assert spec["replicas"] == 3
    assert {"--page-size=32", "--dp=1"} <= set(args(found, "r-diptych-decode-x"))
    assert spec["template"]["spec"]["nodeSelector"] == {"a": "b", "c": "d"}


def test_a_pool_takes_away_what_workers_have_by_null_and_adds_to_their_variables() -> None:
    workers = "nodeSelector: {a: b, c: d}, options: {tp: 1, numThreads: 2}, resources: {limits: {cpu: '2'}}"
    own = "nodeSelector: {a: null}, options: {numThreads: null}, resources: {limits: {cpu: null}}"
    variables = [f"extraEnv: [{{name: A, value: '1'}}, {{name: B, value: '{number}'}}]" for number in (1, 2)]
    none = "podSpec: {dnsPolicy: null}"  # what it says of a pod goes to Kubernetes as it is
    pools = f"[{{name: default, {own}, {none}, {variables[1].replace('{name: A, value: ' + repr('1') + '}, ', '')}}}]"
    found = objects(f"{{workers: {{{workers}, {variables[0]}}}, decode: {{pools: {pools}}}}}")
    spec = found.pods()[DECODE]["spec"]
    assert (spec["nodeSelector"], spec["dnsPolicy"]) == ({"c": "d"}, None)
    assert not [each for each in args(found, DECODE) if "num-threads" in each]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert {name: env(found, DECODE)[name] for name in "AB"} == {"A": "1", "B": "2"}
    assert {name: env(found, PREFILL)[name] for name in "AB"} == {"A": "1", "B": "1"}


def test_what_is_said_of_the_model_reaches_whom_it_concerns() -> None:
    template = "{% for m in messages %}{{ m.content }}$(X){% endfor %}"
    model = {"servedNames": ["ours", "org/other"], "maxLen": 4096, "chatTemplate": template}
    found = objects(yaml.safe_dump({"model": model}))
    own = {"--served-model-name=ours,org/other", "--chat-template=" + template.replace("$(", "$$(")}
    assert {"--max-model-len=4096"} | own <= set(args(found, ROUTER))
    assert "--max-model-len=4096" in args(found, PREFILL)
    assert not own & set(args(found, PREFILL))
    assert not [flag for flag in args(objects(), ROUTER) if flag.startswith(("--max-model-len", "--served", "--chat"))]


def test_pages_in_browsers_are_named_by_an_option_of_the_router() -> None:
    found = objects("{router: {options: {corsOrigins: ['https://chat.example', 'http://localhost:3000']}}}")
    assert "--cors-origins=https://chat.example,http://localhost:3000" in args(found, ROUTER)


@pytest.mark.parametrize("name", [ROUTER, "r-diptych-bootstrap", PREFILL])
def test_a_variable_of_the_operators_takes_the_place_of_the_charts(name: str) -> None:
    own = "extraEnv: [{name: DIPTYCH_LOG_LEVEL, value: error}, {name: A, value: b}]"
    found = objects(f"{{router: {{{own}}}, bootstrap: {{{own}}}, workers: {{{own}}}}}").container(name)["env"]
    names = [each["name"] for each in found]
    assert len(set(names)) == len(names), "server-side apply refuses two of one name"
    assert found[-2:] == [{"name": "DIPTYCH_LOG_LEVEL", "value": "error"}, {"name": "A", "value": "b"}]


def test_options_become_flags() -> None:
    options = {"kvCacheMib": 2048, "gpuMemoryShare": 0.85, "tenantWeights": ["a=2", "b=1"], "stallS": 90}
    flags = ["--gpu-memory-share=0.85", "--kv-cache-mib=2048", "--stall-s=90", "--tenant-weights=a=2,b=1"]
    assert args(pool(options=options), DECODE)[-4:] == flags
    assert args(objects("router: {options: {runtimeLora: false}}"), ROUTER)[-1] == "--no-runtime-lora"


def test_large_numbers_are_written_out() -> None:
    assert "--max-body-bytes=67108864" in args(objects("router: {options: {maxBodyBytes: 67108864}}"), ROUTER)
    assert "--kv-cache-mib=1000000" in args(
        pool(options={"kvCacheMib": 1000000}, resources={"limits": {"memory": "2Ti"}}), DECODE
    )


def test_pods_listen_at_every_address_and_services_have_those_that_are_asked_for() -> None:
    found = objects("router: {service: {headless: true, ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv6, IPv4]}}")
    assert {env(found, name)["DIPTYCH_HOST"] for name in (ROUTER, PREFILL, DECODE, "r-diptych-bootstrap")} == {"::"}
    for name in (ROUTER, f"{ROUTER}-headless"):
        spec = found[f"Service/{name}"]["spec"]
        assert (spec["ipFamilyPolicy"], spec["ipFamilies"]) == ("RequireDualStack", ["IPv6", "IPv4"])
    assert "ipFamilies" not in objects()[f"Service/{ROUTER}"]["spec"]


def test_routers_send_traces_where_a_collector_is_named() -> None:
    found = objects('tracing: {endpoint: "http://collector.observability:4317", sampleRatio: 0.25}')
    assert {name: value for name, value in env(found, ROUTER).items() if name.startswith("OTEL_")} == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability:4317",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    others = [env(found, name) for name in (PREFILL, DECODE, "r-diptych-bootstrap")] + [env(objects(), ROUTER)]
    assert not any(name.startswith("OTEL_") for each in others for name in each)


def test_members_know_their_pod_and_find_every_replica_of_bootstrap() -> None:
    found = env(objects(), DECODE)
    assert found["DIPTYCH_BOOTSTRAP"] == "dns:///r-diptych-bootstrap:7000"
    assert found["DIPTYCH_ADVERTISE_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert found["DIPTYCH_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert env(objects(), ROUTER)["DIPTYCH_ROUTER"] == "http://localhost:8000", "status asks it without bootstrap"
    service = objects()["Service/r-diptych-bootstrap"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 60 + 30 + 15),
        ({"drainSeconds": 600}, 600 + 30 + 15),
        ({"options": {"kvTransferTimeoutS": 12.5}}, 60 + 13 + 15),
        ({"preStop": {"exec": {"command": ["a"]}}, "preStopSeconds": 7}, 7 + 60 + 30 + 15),
        ({"terminationGracePeriodSeconds": 900}, 900),
    ],
)
def test_a_worker_has_the_time_that_its_drain_takes(values: dict[str, Any], seconds: int) -> None:
    found = pool(**values)
    assert found.pods()[DECODE]["spec"]["terminationGracePeriodSeconds"] == seconds
    assert f"--drain-s={values.get('drainSeconds', 60)}" in args(found, DECODE)


@pytest.mark.parametrize("memory", ["612Mi", "642M", "642000k", "642000000", "0.6Gi", "1G"])
def test_a_limit_is_read_as_kubernetes_reads_it(memory: str) -> None:
    limits = pool(options={"kvCacheMib": 256}, resources={"limits": {"memory": memory}}).container(DECODE)["resources"][
        "limits"
    ]
    assert limits == {"memory": memory}


def test_streams_have_ten_minutes_when_their_router_goes() -> None:
    command = objects().container(ROUTER)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["diptych", "drain", "--deadline-s=600", "--linger-s=5"]
    assert objects().pods()[ROUTER]["spec"]["terminationGracePeriodSeconds"] == 600 + 5 + 30


def test_a_router_drains_in_its_hook_and_is_given_the_time() -> None:
    found = objects("router: {drainSeconds: 100, endpointSeconds: 7}")
    command = found.container(ROUTER)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["diptych", "drain", "--deadline-s=100", "--linger-s=7"]
    assert "DIPTYCH_POD_NAME" in env(found, ROUTER), "by which the command knows whom it drains"
    assert found.pods()[ROUTER]["spec"]["terminationGracePeriodSeconds"] == 100 + 7 + 30


@pytest.mark.parametrize(
    ("values", "surge"), [({}, 1), ({"gpu": {"count": 1}}, 0), ({"rdma": {"enabled": True}}, 0)], ids=str
)
def test_a_rollout_needs_no_spare_device(values: dict[str, Any], surge: int) -> None:
    strategy = deployment(pool(**values), DECODE)["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_gpus_and_rdma_devices_are_limits_and_bring_their_image() -> None:
    found = objects(scenario="rdma")
    container = found.container("diptych-decode" if "Deployment/diptych-decode" in found else DECODE)
    assert container["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["image"] == "diptych:0.1.0-cuda"
    assert "--kv-require=rdma" in container["args"]
    assert {"name": "UCX_IB_GID_INDEX", "value": "3"} in container["env"]


def test_gpus_of_claims_make_a_pool_of_gpus_without_a_plugins_resource() -> None:
    found = pool(
        gpu={"count": 2, "resource": ""},
        options={"tp": 2, "device": "cuda"},
        podSpec={"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]},
        containerSpec={"resources": {"claims": [{"name": "gpus"}]}},
    )
    container = found.container(DECODE)
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    assert container["resources"]["limits"] == {"memory": "4Gi"}
    assert container["image"] == "diptych:0.1.0-cuda"
    assert deployment(found, DECODE)["strategy"]["rollingUpdate"]["maxSurge"] == 0


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("{}", "diptych:0.1.0-cpu"),
        ("{tag: v2}", "diptych:v2"),
        ("{registry: a.b/c, repository: d/e, tag: v2}", "a.b/c/d/e:v2"),
        ("{digest: 'sha256:" + "a" * 64 + "', tag: v2}", "diptych@sha256:" + "a" * 64),
    ],
)
def test_images_have_a_registry_and_a_tag_or_digest(image: str, name: str) -> None:
    assert objects(f"image: {image}").container(ROUTER)["image"] == name


def test_a_pools_own_image_beats_the_common_digest() -> None:
    found = objects(f"{{image: {{digest: 'sha256:{'a' * 64}'}}, workers: {{image: {{repository: x, tag: v3}}}}}}")
    assert (found.container(DECODE)["image"], found.container(ROUTER)["image"][:14]) == ("x:v3", "diptych@sha256")


def test_probes_ask_the_health_port_and_loading_has_its_time() -> None:
    container = pool(startupSeconds=3600, ports={"grpc": 1, "metrics": 2, "health": 3}).container(DECODE)
    assert {"name": "health", "containerPort": 3} in container["ports"]
    for kind in ("startup", "readiness", "liveness"):
        path = {"startup": "startup", "readiness": "ready", "liveness": "live"}[kind]
        assert container[f"{kind}Probe"]["httpGet"] == {"path": f"/health/{path}", "port": "health"}
        assert container[f"{kind}Probe"]["timeoutSeconds"] >= 5
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


def test_a_router_that_hangs_leaves_its_service_and_ends_without_the_grace_of_a_drain() -> None:
    router = objects(kube="1.28").container(ROUTER)
    liveness, readiness = router["livenessProbe"], router["readinessProbe"]
    for probe in (liveness, readiness):
        assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (1, 1)
    assert readiness["failureThreshold"] == 2, "one late answer of the only one that stays would refuse connections"
    assert liveness["failureThreshold"] == 5, "a node that stalls for two seconds would end all streams"
    assert readiness["httpGet"]["path"] == "/health/answers", "without a pair clients get its 503, not a refusal"
    assert liveness["terminationGracePeriodSeconds"] == 1
    assert "terminationGracePeriodSeconds" not in objects(kube="1.24").container(ROUTER)["livenessProbe"]


def test_a_rollout_waits_for_longer_than_a_load() -> None:
    assert deployment(pool(startupSeconds=3600), DECODE)["progressDeadlineSeconds"] == 3600 + 60 + 30 + 15 + 300


def test_a_rollout_waits_for_a_model_that_is_fetched_first() -> None:
    names = ("r-diptych-unified-small", ROUTER)
    plain = objects("{model: {fetch: {image: ''}}}", scenario="unified")
    slow = objects("{model: {fetch: {seconds: 4000}}}", scenario="unified")
    longer = [
        deployment(slow, n)["progressDeadlineSeconds"] - deployment(plain, n)["progressDeadlineSeconds"] for n in names
    ]
    assert longer == [4000, 4000]


def test_shared_memory_holds_the_kv_pages() -> None:
    def size(**values: Any) -> str:
        volumes = pool(**values).pods()[DECODE]["spec"]["volumes"]
        return str(next(each for each in volumes if each["name"] == "shm")["emptyDir"]["sizeLimit"])

    limits = {"limits": {"memory": "64Gi"}}
    assert size(options={"kvCacheMib": 1024, "dp": 2, "hostCacheMib": 512}, resources=limits) == "3328Mi"
    assert size() == "768Mi"
    assert size(gpu={"count": 1}) == "2048Mi"
    assert size(shm={"size": "3Gi"}) == "3Gi"


def test_files_of_kv_lie_in_a_volume_that_outlives_a_container() -> None:
    def file_cache(**values: Any) -> tuple[Any, Any, list[str]]:
        found = pool(**values)
        spec, container = found.pods()[DECODE]["spec"], found.container(DECODE)
        volumes = {each.pop("name"): each for each in spec["volumes"]}
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        return volumes.get("file-cache"), mounts.get("file-cache"), [a for a in container["args"] if "file-cache" in a]

    flags = ["--file-cache-dir=/var/cache/diptych", "--file-cache-mib=1024"]
    ours = file_cache(fileCache={"mib": 1024}, options={"dp": 2})
    assert ours == ({"emptyDir": {"sizeLimit": "4608Mi"}}, "/var/cache/diptych", flags)
    theirs = file_cache(fileCache={"mib": 1024, "existingClaim": "kv"})
    assert theirs == ({"persistentVolumeClaim": {"claimName": "kv"}}, "/var/cache/diptych", flags)
    assert file_cache() == (None, None, [])


def test_a_shared_store_has_a_url_and_credentials_from_a_secret() -> None:
    def store(**values: Any) -> tuple[list[str], Any]:
        container = pool(**values).container(DECODE)
        return [each for each in container["args"] if "shared-cache" in each], container.get("envFrom")

    bucket = {"sharedCache": {"url": "s3://kv/a", "existingSecret": "keys"}, "envFrom": [{"secretRef": {"name": "b"}}]}
    secrets = [{"secretRef": {"name": "keys"}}, {"secretRef": {"name": "b"}}]
    assert store(**bucket) == (["--shared-cache=s3://kv/a"], secrets)
    folder = store(sharedCache={"url": "file:///mnt/kv", "mib": 1024})
    assert folder == (["--shared-cache=file:///mnt/kv", "--shared-cache-mib=1024"], None)
    assert store() == ([], None)


def test_who_could_not_pair_has_another_compat_label() -> None:
    def label(values: str = "") -> str:
        return str(objects(values).pods()[DECODE]["metadata"]["labels"]["diptych.io/compat"])

    assert label() == label("{workers: {options: {pageSize: 32, dtype: bfloat16}}, image: {tag: v2}}")
    others = ("{model: {name: qwen}}", "{model: {revision: b}}", "{workers: {options: {kvBackend: nixl}}}")
    assert len({label(), *map(label, others)}) == 4


def test_selectors_are_minimal_and_do_not_change_with_the_chart() -> None:
    found = objects(scenario="everything")
    for each in found.of_kind("Deployment"):
        keys = set(each["spec"]["selector"]["matchLabels"])
        common = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
        assert keys in (common, common | {"diptych.io/role", "diptych.io/pool"})
        pod = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= pod.items()
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod), "a new chart alone would roll all pods"


def test_replicas_are_left_to_the_autoscaler() -> None:
    found = objects(scenario="hpa")
    assert "replicas" not in deployment(found, DECODE)
    assert "replicas" not in deployment(found, ROUTER)
    metrics = {
        each["metadata"]["name"]: [
            (metric["pods"]["metric"]["name"], metric["pods"]["target"]["averageValue"])
            for metric in each["spec"]["metrics"]
            if "pods" in metric
        ]
        for each in found.of_kind("HorizontalPodAutoscaler")
    }
    assert metrics == {
        ROUTER: [],
        PREFILL: [("diptych_worker_prefill_backlog_seconds", "10000m"), ("diptych_worker_prefill_busy_ratio", "700m")],
        DECODE: [("diptych_worker_kv_demand_ratio", "800m")],
    }


def test_decode_shrinks_slower_than_prefill() -> None:
    found = objects(scenario="hpa")
    periods = {
        name: found[f"HorizontalPodAutoscaler/{name}"]["spec"]["behavior"]["scaleDown"]["policies"][0]["periodSeconds"]
        for name in (PREFILL, DECODE)
    }
    assert periods == {PREFILL: 60, DECODE: 120}


def test_keda_asks_about_its_own_release_and_pool_and_takes_silence_for_an_error() -> None:
    spec = objects(scenario="keda")[f"ScaledObject/{DECODE}"]["spec"]
    assert [each["metadata"]["query"] for each in spec["triggers"]] == [
        f'max(diptych_router_pool_{metric}{{namespace="ns",app_kubernetes_io_instance="r",pool="default",role="decode"}})'
        for metric in ("kv_full_workers", "requests_running")
    ]
    assert {each["metadata"]["ignoreNullValues"] for each in spec["triggers"]} == {"false"}
    assert [each["metadata"]["threshold"] for each in spec["triggers"]] == ["0.8", "48"]
    assert spec["fallback"]["replicas"] == 4


def test_keda_counts_each_scheduler_of_a_pod() -> None:
    pool = "{name: default, options: {dp: 2, kvCacheMib: 256}}"
    spec = objects(f"decode: {{pools: [{pool}]}}", scenario="keda")[f"ScaledObject/{DECODE}"]["spec"]
    assert [each["metadata"]["threshold"] for each in spec["triggers"]] == ["1.6"]


def test_a_budget_a_pool_that_never_blocks_the_drain_of_a_node() -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in objects().of_kind("PodDisruptionBudget")}
    assert {name: spec["maxUnavailable"] for name, spec in budgets.items()} == {
        "r-diptych-bootstrap": 1,
        ROUTER: 1,
        PREFILL: 1,
        DECODE: 1,
    }


def test_spread_constraints_select_their_own_pool() -> None:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    found = pool(topologySpreadConstraints=[constraint]).pods()[DECODE]["spec"]["topologySpreadConstraints"]
    assert found[0]["labelSelector"]["matchLabels"]["diptych.io/role"] == "decode"


def test_a_selector_of_their_own_is_left_as_it_is() -> None:
    own = {"matchLabels": {"team": "a"}}
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": own}
    found = pool(topologySpreadConstraints=[constraint]).pods()[DECODE]["spec"]["topologySpreadConstraints"]
    assert found == [constraint]


def test_names_that_yaml_takes_for_numbers_stay_names() -> None:
    tls = "tls: {enabled: true, name: '7', existingSecret: '8'}"
    names = f"fullnameOverride: 'on', nameOverride: '2', namespaceOverride: '3', auth: {{{tls}}}"
    pools = "decode: {pools: [{name: '1e3', topologySpreadConstraints: [{topologyKey: zone}]}]}"
    found = objects(f"{{{names}, {pools}, model: {{name: 'a: b'}}, metrics: {{rules: {{enabled: true}}}}}}")
    for each in found.values():
        strings = (each["metadata"]["name"], each["metadata"]["namespace"], *each["metadata"]["labels"].values())
        assert all(isinstance(value, str) for value in strings)
    pod = found.pods()["on-decode-1e3"]
    assert pod["metadata"]["labels"]["diptych.io/pool"] == "1e3"
    spread = pod["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
    assert spread["diptych.io/pool"] == "1e3"
    assert "--model=a: b" in args(found, "on-decode-1e3")
    assert env(found, "on-decode-1e3")["DIPTYCH_TLS_NAME"] == "7"
    assert {"secretName": "8", "defaultMode": 0o440} in [volume.get("secret") for volume in pod["spec"]["volumes"]]


def test_weights_are_mounted_read_only_by_workers_and_routers() -> None:
    found = objects(scenario="gpu")
    for name in (ROUTER, DECODE):
        mounts = {each["name"]: each for each in found.container(name)["volumeMounts"]}
        assert mounts["model"] == {"name": "model", "mountPath": "/models", "readOnly": True}
        assert "--model=/models/llama-3-8b-instruct" in args(found, name)


def test_weights_may_come_by_a_volume_of_the_operators() -> None:
    volume = "extraVolumes: [{name: bucket, csi: {driver: s3.csi.aws.com, readOnly: true}}]"
    mounted = f"{volume}, extraVolumeMounts: [{{name: bucket, mountPath: /models}}]"
    found = objects(f"{{model: {{name: /models/a}}, router: {{{mounted}}}, workers: {{{mounted}}}}}")
    for name in (ROUTER, PREFILL, DECODE):
        assert "--model=/models/a" in args(found, name)
        assert {"name": "bucket", "mountPath": "/models"} in found.container(name)["volumeMounts"]


def test_an_init_container_brings_weights_into_the_volume() -> None:
    pod = objects(scenario="unified").pods()["r-diptych-unified-small"]["spec"]
    (fetch,) = pod["initContainers"]
    assert {"name": "model", "mountPath": "/models"} in fetch["volumeMounts"]
    assert fetch["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_who_fetches_a_model_is_told_for_whom_and_has_a_home_to_write_to() -> None:
    own = "{name: DIPTYCH_COMPONENT, value: mine}, {name: HF_TOKEN, value: a}"
    for values, names in (("", {"router": "router", "unified-small": "worker"}), (own, {"router": "mine"})):
        pods = objects(f"model: {{fetch: {{env: [{values}]}}}}", scenario="unified").pods()
        for name, component in names.items():
            (fetch,) = pods[f"r-diptych-{name}"]["spec"]["initContainers"]
            found = {each["name"]: each["value"] for each in fetch["env"]}
            assert (found["HOME"], found["DIPTYCH_COMPONENT"]) == ("/tmp", component)
            assert len(found) == len(fetch["env"]), "server-side apply refuses two of one name"


def test_an_oci_image_is_a_volume() -> None:
    volumes = objects(scenario="oci").pods()[DECODE]["spec"]["volumes"]
    image = next(each["image"] for each in volumes if each["name"] == "model")
    assert image == {"reference": "registry.example.com/models/qwen3-8b:2025-04", "pullPolicy": "IfNotPresent"}


def test_host_network_flips_dns_and_takes_the_ports_that_are_given() -> None:
    found = objects(scenario="everything")
    pod = found.pods()["r-llm-prefill-gpu"]["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert "--port=7110" in args(found, "r-llm-prefill-gpu")


def test_the_service_speaks_http_and_cleartext_http2() -> None:
    ports = objects()[f"Service/{ROUTER}"]["spec"]["ports"]
    assert [(each["name"], each["port"], each["appProtocol"]) for each in ports] == [
        ("http", 8000, "http"),
        ("grpc", 9000, "kubernetes.io/h2c"),
    ]


def test_a_load_balancer_has_the_class_and_the_ports_of_nodes_that_are_asked_for() -> None:
    spec = objects(scenario="everything")["Service/r-llm-router"]["spec"]
    assert spec["loadBalancerClass"] == "example.com/lb"
    assert {each["name"]: each["nodePort"] for each in spec["ports"]} == {"http": 30080, "grpc": 30090}
    assert "loadBalancerClass" not in objects()[f"Service/{ROUTER}"]["spec"]


def test_routes_lead_to_the_service() -> None:
    found = objects(scenario="tls")
    (http,) = found[f"HTTPRoute/{ROUTER}"]["spec"]["rules"]
    assert http["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert http["timeouts"] == {"request": "0s"}
    (grpc,) = found[f"GRPCRoute/{ROUTER}"]["spec"]["rules"]
    assert grpc["backendRefs"] == [{"name": ROUTER, "port": 9000}]


def prefixes(rule: dict[str, Any]) -> list[str]:
    """The paths that a rule of an Ingress or of an HTTPRoute leads on."""
    if "http" in rule:
        return [each["path"] for each in rule["http"]["paths"]]
    return [each["path"]["value"] for each in rule["matches"]]


def test_the_console_is_reached_under_the_operators_host_alone() -> None:
    found = chart.objects(scenario="everything")
    hosts = {
        (kind, each["spec"].get("hostnames", [None])[0] or rule.get("host"), path)
        for kind in ("Ingress", "HTTPRoute")
        for each in found.of_kind(kind)
        for rule in each["spec"]["rules"]
        for path in prefixes(rule)
    }
    assert {each for each in hosts if each[2] != "/diptych.v1.Inference/"} == {
        ("Ingress", "llm.example.com", "/v1"),
        ("Ingress", "console.llm.example.com", "/console"),
        ("Ingress", "console.llm.example.com", "/v1"),  # for its playground
        ("HTTPRoute", None, "/v1"),
        ("HTTPRoute", "console.llm.example.com", "/console"),
        ("HTTPRoute", "console.llm.example.com", "/v1"),
    }
    classes = {each["metadata"]["name"]: each["spec"]["ingressClassName"] for each in found.of_kind("Ingress")}
    assert classes == {"r-llm-router": "nginx", "r-llm-router-console": "internal", "r-llm-router-grpc": "nginx"}


def test_the_console_is_switched_off_and_shows_text_only_where_that_is_said() -> None:
    def flags(values: str) -> list[str]:
        (container,) = objects(values).pods()["r-diptych-router"]["spec"]["containers"]
        return [each for each in container["args"] if each.startswith("--console")]

    assert flags("{}") == ["--console=on"]
    assert flags("router: {console: {enabled: false}}") == ["--console=off"]
    assert flags("router: {console: {text: true}}") == ["--console=on", "--console-text"]


def test_routes_filter_and_share_their_traffic_with_other_backends() -> None:
    rule = "filters: [{type: RequestMirror}], weight: %d, extraBackendRefs: [{name: next, port: 8000, weight: 5}]"
    both = ", ".join(f"{kind}: {{enabled: true, parentRefs: [{{name: g}}], {rule}}}" for kind in ("http", "grpc"))
    for weight in (95, 0):
        found = objects(f"gateway: {{{both % (weight, weight)}}}")
        for kind, port in (("HTTPRoute", 8000), ("GRPCRoute", 9000)):
            (made,) = found[f"{kind}/{ROUTER}"]["spec"]["rules"]
            assert made["filters"] == [{"type": "RequestMirror"}]
            ours = {"name": ROUTER, "port": port, "weight": weight}
            assert made["backendRefs"] == [ours, {"name": "next", "port": 8000, "weight": 5}]


def test_what_others_look_for_is_in_the_namespaces_where_they_look() -> None:
    kinds = {"monitors": "PodMonitor", "rules": "PrometheusRule", "dashboards": "ConfigMap"}
    given = ", ".join(f"{name}: {{enabled: true, namespace: of-{name}}}" for name in kinds)
    found = objects(f"metrics: {{{given}}}")
    for name, kind in kinds.items():
        placed = (
            each["metadata"] for each in found.of_kind(kind) if not each["metadata"]["name"].endswith("-declared")
        )
        assert {each["namespace"] for each in placed} == {f"of-{name}"}
    monitors = (*found.of_kind("PodMonitor"), *found.of_kind("ServiceMonitor"))
    assert {str(each["spec"]["namespaceSelector"]) for each in monitors} == {"{'matchNames': ['ns']}"}
    here = objects(scenario="everything").of_kind("PodMonitor")
    assert all("namespaceSelector" not in each["spec"] for each in here)


def test_fields_that_the_chart_does_not_know_can_be_given() -> None:
    found = objects("workers: {podSpec: {hostUsers: false}, containerSpec: {livenessProbe: {periodSeconds: 30}}}")
    assert found.pods()[DECODE]["spec"]["hostUsers"] is False
    probe = found.container(DECODE)["livenessProbe"]
    assert (probe["periodSeconds"], probe["httpGet"]["port"]) == (30, "health")


def test_extra_objects_may_use_templates() -> None:
    found = objects(scenario="everything")
    assert found["ConfigMap/extra"]["data"] == {"release": "r"}
    assert found["ConfigMap/extra-text"]["metadata"]["namespace"] == "ns"


def test_common_labels_and_annotations_are_everywhere() -> None:
    for each in objects(scenario="everything").values():
        if not each["metadata"]["name"].startswith("extra"):
            assert each["metadata"]["labels"]["team"] == "platform"
            assert each["metadata"]["annotations"]["example.com/owner"] == "platform"


def test_of_two_labels_with_one_key_the_operators_is_taken_and_of_two_of_theirs_the_nearer() -> None:
    common = "commonLabels: {app.kubernetes.io/part-of: ai, team: a}"
    found = objects(f"{{{common}, workers: {{podLabels: {{team: b}}}}, router: {{service: {{labels: {{team: c}}}}}}}}")
    assert found["Deployment/" + DECODE]["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ai"
    assert found.pods()[DECODE]["metadata"]["labels"]["team"] == "b"
    assert found[f"Service/{ROUTER}"]["metadata"]["labels"]["team"] == "c"


def test_helm_test_completes_a_prompt_and_moves_kv() -> None:
    found = objects("tests: {promptTokens: 100}")
    checks = {each["metadata"]["name"]: each["spec"]["containers"][0] for each in found.of_kind("Pod")}
    assert {name: container["args"][:2] for name, container in checks.items()} == {
        "r-diptych-test-answers": ["check", "answers"],
        "r-diptych-test-kv": ["check", "kv"],
    }
    assert "--prompt-tokens=100" in checks["r-diptych-test-kv"]["args"]
    assert not objects(scenario="unified").get("Pod/r-diptych-test-kv"), "nothing is handed over there"
    mixed = objects("unified: {pools: [{name: default}]}")
    assert not mixed.get("Pod/r-diptych-test-kv"), "a unified worker may serve its request"


def test_the_notes_warn_of_what_may_not_be_meant() -> None:
    def notes(values: str) -> str:
        return chart.run("install", "r", str(chart.CHART), "--dry-run=client", "--hide-secret", values=values).stdout

    assert "NOTE: apiKeys.open: whoever reaches" in notes("{apiKeys: {open: true}, networkPolicy: {open: true}}")
    assert "NOTE: networkPolicy.clients is empty: the API is reached by `helm test`" in notes("")
    assert "clients is empty" not in notes("networkPolicy: {clients: [{podSelector: {}}]}")
    assert "NOTE: router.drainSeconds is 60: a stream that runs for longer" in notes("router: {drainSeconds: 60}")
    assert "router.drainSeconds" not in notes("")
    found = notes("{workers: {gpu: {count: 1}}, networkPolicy: {enabled: false}}")
    assert "NOTE: decode pool default has one worker, and a rollout stops it" in found
    assert "NOTE: decode pool default: the image for GPUs does not hold smollm2" in found
    assert "NOTE: networkPolicy is off" in found
    found = notes("{router: {checkPods: true}, networkPolicy: {egress: {enabled: true}}}")
    assert "NOTE: router.checkPods: networkPolicy.egress.extra must let routers" in found
    tls = "tls: {enabled: true}, token: {enabled: false}"
    assert "NOTE: Secrets that the chart made stay" in notes(f"{{auth: {{{tls}}}, apiKeys: {{open: true}}}}")
    assert "port-forward svc/r-diptych-router 8000 9000" in found


@pytest.mark.parametrize(
    ("image", "warns"),
    [("{tag: v2}", True), ("{tag: v2, variant: cuda}", False), ("{tag: v2-cuda}", False), ("{}", False)],
)
def test_the_notes_ask_whether_the_image_of_all_is_made_for_gpus(image: str, warns: bool) -> None:
    values = f"{{image: {image}, decode: {{pools: [{{name: default, gpu: {{count: 1}}}}]}}}}"
    notes = chart.run("install", "r", str(chart.CHART), "--dry-run=client", "--hide-secret", values=values).stdout
    assert ("NOTE: decode pool default computes on GPUs with the image of all, v2." in notes) is warns


def test_the_helper_and_helm_test_run_where_they_are_told() -> None:
    place = "nodeSelector: {disk: ssd}, tolerations: [{operator: Exists}], priorityClassName: low"
    pods = objects(f"{{deletionCosts: {{enabled: true, {place}}}, tests: {{{place}}}}}").pods()
    for name in ("r-diptych-deletion-costs", "r-diptych-test-answers", "r-diptych-test-kv"):
        spec = pods[name]["spec"]
        found = (spec["nodeSelector"], spec["tolerations"], spec["priorityClassName"])
        assert found == ({"disk": "ssd"}, [{"operator": "Exists"}], "low"), name


MODEL = '{"format": "diptych step model 1"}'


def test_a_planner_that_acts_leaves_replicas_to_itself_and_is_alone() -> None:
    found, shadow = objects(scenario="planner"), objects("planner: {act: false}", scenario="planner")
    for pool in ("prefill", "decode"):
        assert "replicas" not in found[f"Deployment/r-diptych-{pool}"]["spec"]
        assert shadow[f"Deployment/r-diptych-{pool}"]["spec"]["replicas"] == 1
    spec = found["Deployment/r-diptych-planner"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = found.pods()["r-diptych-planner"]["spec"]["containers"]
    assert {"--act", "--gpus=16", "--least=prefill=1,decode=1", "--drain-s=60"} <= set(container["args"])
    (told,) = shadow.pods()["r-diptych-planner"]["spec"]["containers"]
    assert "--act" not in told["args"]


@pytest.mark.parametrize("scenario", ["everything", "hpa", "planner"])
def test_values_of_a_release_before_the_planner_render_as_without_one(scenario: str) -> None:
    before, off = (
        {name: each for name, each in objects(values, scenario=scenario).items() if each["kind"] != "Secret"}
        for values in ("planner: null", "planner: {enabled: false, act: false}")
    )
    assert before == off


def test_another_step_model_is_another_file_so_that_the_planner_begins_anew() -> None:
    names = []
    for text in (MODEL, MODEL + " "):
        found = objects(f"planner: {{stepModel: {text!r}}}", scenario="planner")
        (config,) = (each for each in found.of_kind("ConfigMap") if "planner" in each["metadata"]["name"])
        assert config["data"]["step-model.json"].strip() == MODEL
        pod = found.pods()["r-diptych-planner"]["spec"]
        assert "--step-model=/etc/diptych/planner/step-model.json" in pod["containers"][0]["args"]
        assert {"name": config["metadata"]["name"]} in [each.get("configMap") for each in pod["volumes"]]
        names.append(config["metadata"]["name"])
    assert names[0] != names[1]


def test_routers_keep_batches_in_a_bucket_or_on_a_volume() -> None:
    bucket = objects("router: {batches: {store: 's3://jobs/here', existingSecret: aws}}").pods()["r-diptych-router"]
    (container,) = bucket["spec"]["containers"]
    assert "--batch-store=s3://jobs/here" in container["args"]
    assert container["envFrom"] == [{"secretRef": {"name": "aws"}}]
    claim = objects("router: {batches: {existingClaim: jobs}}").pods()["r-diptych-router"]["spec"]
    (container,) = claim["containers"]
    assert "--batch-store=/var/lib/diptych/batches" in container["args"]
    assert {"name": "batches", "mountPath": "/var/lib/diptych/batches"} in container["volumeMounts"]
    assert {"name": "batches", "persistentVolumeClaim": {"claimName": "jobs"}} in claim["volumes"]
    (container,) = objects().pods()["r-diptych-router"]["spec"]["containers"]
    assert not any("batch-store" in each for each in container["args"])


MODELS = """
model: {name: /models/a, maxLen: 4096, volume: {pvc: {claimName: c}}}
models:
  - path: /models/b
    servedName: bee
    prefill: [{name: b, replicas: 3, resources: {requests: {cpu: 7}}}]
    decode: [{name: b}]
  - {path: /models/c, unified: [{name: c, replicas: 2, gpu: {count: 1}}]}
"""


def test_each_model_has_pools_of_its_own_and_the_routers_serve_all() -> None:
    found = objects(MODELS)
    flags = args(found, ROUTER)
    assert flags[flags.index("--model=/models/a") :][:4] == [
        "--model=/models/a",
        "--load-format=auto",
        "--max-model-len=4096",
        "--further-models=bee=/models/b,/models/c",
    ]
    served = {
        each["metadata"]["name"]: (
            each["spec"]["replicas"],
            [flag for flag in found.container(each["metadata"]["name"])["args"] if "model" in flag],
        )
        for each in found.of_kind("Deployment")
        if "diptych.io/role" in each["metadata"]["labels"]
    }
    first = ["--model=/models/a", "--max-model-len=4096"]
    assert served == {
        PREFILL: (1, first),
        DECODE: (1, first),
        f"{PREFILL}-b": (3, ["--model=/models/b"]),
        f"{DECODE}-b": (1, ["--model=/models/b"]),
        "r-diptych-unified-c": (2, ["--model=/models/c"]),
    }
    assert found.container(f"{PREFILL}-b")["resources"]["requests"]["cpu"] == 7
    compat = [
        each["metadata"]["labels"]["diptych.io/compat"]
        for each in found.of_kind("Deployment")
        if "diptych.io/compat" in each["metadata"]["labels"]
    ]
    assert sorted(map(compat.count, set(compat))) == [1, 2, 2], "no pools of two models are taken for partners"
    assert {mount["mountPath"] for mount in found.container(f"{DECODE}-b")["volumeMounts"]} >= {"/models"}
    assert not [flag for flag in args(objects(), ROUTER) if "further" in flag]
