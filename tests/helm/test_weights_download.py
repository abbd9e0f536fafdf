"""`weights`: who downloads, who waits, who only reads, and who may reach what."""

from __future__ import annotations

from typing import Any

import pytest
from chart import Object, Objects, objects, template

TINY = "model: {name: /models/tiny}\n"
PVC = "weights: {source: acme/tiny, secret: hub, env: [{name: HF_ENDPOINT, value: https://mirror}]}\n" + TINY
NODE = "weights: {source: s3://b/tiny, secret: aws, cache: hostPath, hostPath: {path: /var/lib/models}}\n" + TINY
NONE = "weights: {source: https://files:8443/tiny, cache: none}\n" + TINY


def job_of(found: Objects) -> Object:
    (job,) = found.of_kind("Job")
    return job


def init(found: Objects, name: str) -> Object:
    (first,) = found.pods()[name]["spec"]["initContainers"]
    return dict(first)


def volume(pod: Object) -> Any:
    (model,) = [each for each in pod["spec"]["volumes"] if each["name"] == "model"]
    return {key: told for key, told in model.items() if key != "name"}


def mount(container: Object) -> Any:
    (model,) = [each for each in container["volumeMounts"] if each["name"] == "model"]
    return model


def test_a_job_writes_to_a_claim_that_workers_wait_for_and_only_read() -> None:
    found = objects(PVC)
    pod = job_of(found)["spec"]["template"]
    (job,) = pod["spec"]["containers"]
    assert job["args"] == ["download", "acme/tiny", "/models/tiny", "--files=all"]
    assert job["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert {"name": "HF_ENDPOINT", "value": "https://mirror"} in job["env"]
    assert volume(pod) == {"persistentVolumeClaim": {"claimName": "r-diptych-weights", "readOnly": False}}
    assert mount(job) == {"name": "model", "mountPath": "/models"}
    for role in ("prefill", "decode"):
        waits = init(found, f"r-diptych-{role}")
        assert waits["args"][-1] == "--await-s=7200"
        assert "envFrom" not in waits, "who only waits needs no secret"
        assert mount(waits)["readOnly"]
        worker = found.pods()[f"r-diptych-{role}"]
        assert volume(worker) == {"persistentVolumeClaim": {"claimName": "r-diptych-weights", "readOnly": True}}
        assert mount(worker["spec"]["containers"][0])["readOnly"]
    claim = found["PersistentVolumeClaim/r-diptych-weights"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("values", [PVC, NODE, NONE])
def test_routers_fetch_the_tokenizer_alone_into_a_volume_of_their_own(values: str) -> None:
    found = objects(values)
    fetches = init(found, "r-diptych-router")
    assert "--files=tokenizer" in fetches["args"]
    assert volume(found.pods()["r-diptych-router"]) == {"emptyDir": {"sizeLimit": "2Gi"}}
    assert mount(found.container("r-diptych-router"))["readOnly"]


def test_a_nodes_folder_is_filled_by_the_first_worker_there() -> None:
    found = objects(NODE)
    assert not found.of_kind("Job")
    assert not found.of_kind("PersistentVolumeClaim")
    for role in ("prefill", "decode"):
        fetches = init(found, f"r-diptych-{role}")
        assert fetches["args"] == ["download", "s3://b/tiny", "/models/tiny", "--files=all"]
        assert fetches["envFrom"] == [{"secretRef": {"name": "aws"}}]
        pod = found.pods()[f"r-diptych-{role}"]
        assert volume(pod) == {"hostPath": {"path": "/var/lib/models", "type": "DirectoryOrCreate"}}
        assert mount(pod["spec"]["containers"][0])["readOnly"]


def test_without_a_cache_each_worker_has_its_own() -> None:
    assert volume(objects(NONE).pods()["r-diptych-decode"]) == {"emptyDir": {"sizeLimit": "100Gi"}}


def test_another_source_is_another_job_as_the_template_of_one_never_changes() -> None:
    names = {job_of(objects(PVC + extra))["metadata"]["name"] for extra in ("", "image: {tag: other}\n")}
    assert len(names) == 2
    assert names == {job_of(objects(PVC + extra))["metadata"]["name"] for extra in ("", "image: {tag: other}\n")}


def test_a_gguf_file_is_brought_to_its_folder() -> None:
    one = "weights: {source: acme/q, include: ['*Q4.gguf']}\nmodel: {name: /models/q/x-Q4.gguf}"
    (job,) = job_of(objects(one))["spec"]["template"]["spec"]["containers"]
    assert job["args"] == ["download", "acme/q", "/models/q", "--files=all", "--include=*Q4.gguf"]


def test_the_job_has_an_account_without_rights_a_deadline_and_no_callers() -> None:
    found = objects(PVC + "networkPolicy: {egress: {enabled: true}}")
    job = job_of(found)
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (7200, 6)
    pod = job["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("r-diptych-weights", False)
    assert "ServiceAccount/r-diptych-weights" in found
    policy = found["NetworkPolicy/r-diptych-weights"]["spec"]
    assert not policy["ingress"]
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in policy["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 443}]} not in found["NetworkPolicy/r-diptych-worker"]["spec"][
        "egress"
    ]


def test_whoever_downloads_may_reach_the_port_of_the_source() -> None:
    found = objects(NONE + "networkPolicy: {egress: {enabled: true}}")
    for component in ("worker", "router"):
        rules = found[f"NetworkPolicy/r-diptych-{component}"]["spec"]["egress"]
        assert {"ports": [{"protocol": "TCP", "port": 8443}]} in rules


def test_a_rollout_waits_as_long_as_a_download_may_take() -> None:
    slow, usual = objects(TINY + "weights: {source: acme/tiny, deadlineSeconds: 9000}"), objects("")
    for name in ("prefill", "router"):
        path = f"Deployment/r-diptych-{name}"
        assert slow[path]["spec"]["progressDeadlineSeconds"] - usual[path]["spec"]["progressDeadlineSeconds"] == 9000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("weights: {source: acme/tiny}", "name it by model.name, /models/tiny"),
        (PVC + "model: {name: /models/a, volume: {pvc: {claimName: b}}}", "must be empty: choose one"),
        ("weights: {source: acme/tiny, cache: hostPath}\n" + TINY, "weights.hostPath.path, which user 10001 may write"),
        (NODE + "image: {variant: sim}", "the image `sim` can read none: use image.variant cpu"),
        ("weights: {secret: hub}", "weights.source is empty, so weights.secret"),
        ("model: {name: acme/tiny}", "bring the model there by weights.source acme/tiny"),
        ("weights: {source: tiny}", "weights/source"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(values: str, words: str) -> None:
    merged = template(values) if values.count("model:") < 2 else template(values.replace(TINY, ""))
    assert merged.returncode != 0
    assert words in merged.stderr.replace("\n", " ")
