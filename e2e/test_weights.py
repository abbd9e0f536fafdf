"""A model that the chart brings: a Job into a claim, from whoever has models; the first worker into a node's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cluster import Cluster
from conftest import IMAGE
from release import DEPLOYMENTS, NAME, WAIT, WEIGHTS, Release

SCRIPT: Final = Path(__file__).with_name("files_pod.py")
SERVER: Final = Path(__file__).parents[1] / "tests" / "support" / "files_server.py"
CPU_IMAGE: Final = os.environ.get("DIPTYCH_E2E_CPU_IMAGE", "")  # buckets are for images with torch
FOLDER: Final = "/var/tmp/diptych-e2e"  # of the node
OTHER_NODE_FOLDER: Final = f"{FOLDER}/cache"
MODEL: Final = "/tiny/model.safetensors"
USER: Final = 10001
TOKEN: Final = "known to few"
SECRET: Final = {
    **dict.fromkeys(("DIPTYCH_BEARER_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), TOKEN),
    "AWS_ACCESS_KEY_ID": "us",
}
MAKE: Final = f"""
import os, pathlib
for name in ("claim", "cache"):
    folder = pathlib.Path("/node", name)
    folder.mkdir()
    os.chown(folder, {USER}, {USER})
"""
LIST: Final = "import json, os, sys; print(json.dumps(sorted(os.listdir(sys.argv[1]))))"
TOKENIZER: Final = [".diptych-download", "config.json", "tokenizer.json"]
WRITE: Final = "open('/models/tiny/new', 'w')"

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *WEIGHTS)


@pytest.fixture(scope="module", autouse=True)
def _folder(cluster: Cluster) -> Iterator[None]:
    """A folder of the node that the pods' user may write to, and a volume of it."""
    as_root(cluster, "make-folder", MAKE)
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "e2e",
        "hostPath": {"path": f"{FOLDER}/claim"},
        "claimRef": {"namespace": cluster.namespace, "name": "models"},
    }
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": cluster.namespace}, "spec": spec}
    wanted = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "e2e",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": wanted}
    cluster.apply(volume, claim)
    yield
    as_root(cluster, "remove-folder", "import shutil\nfor name in ('claim', 'cache'):\n shutil.rmtree(f'/node/{name}')")
    cluster.kubectl("delete", f"persistentvolume/{cluster.namespace}", "--wait=false")


@pytest.fixture(scope="module", autouse=True)
def _files(cluster: Cluster) -> None:
    """A server of the model, by the name `files`, and the secret of who may ask it."""
    data = {each.name: each.read_text() for each in (SCRIPT, SERVER)}
    labels = {"app": "files"}
    container = {
        **container_of("files", f"/e2e/{SCRIPT.name}"),
        "envFrom": [{"secretRef": {"name": "files"}}],
        "volumeMounts": [{"name": "script", "mountPath": "/e2e"}],
    }
    volumes = [{"name": "script", "configMap": {"name": "files"}}]
    spec = {"containers": [container], "volumes": volumes}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"}, "data": data},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "files"}, "stringData": SECRET},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "files", "labels": labels}, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "files"},
            "spec": {"selector": labels, "ports": [{"port": 8000}]},
        },
    )
    cluster.wait("pod/files", "condition=Ready")
    cluster.see("ready", "logs", "--follow", "files")


def container_of(name: str, *arguments: str) -> dict[str, Any]:
    return {"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["python", *arguments]}


def as_root(cluster: Cluster, name: str, script: str) -> None:
    mounts = [{"name": "node", "mountPath": "/node"}]
    container = {**container_of(name, "-c", script), "volumeMounts": mounts, "securityContext": {"runAsUser": 0}}
    volumes = [{"name": "node", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}]
    spec = {"containers": [container], "volumes": volumes, "restartPolicy": "Never"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    cluster.wait(f"pod/{name}", "jsonpath={.status.phase}=Succeeded")


def sent(cluster: Cluster) -> list[dict[str, Any]]:
    """What the server has sent so far, without the line that says it is ready."""
    return [json.loads(line) for line in cluster.kubectl("logs", "files").splitlines()][1:]


def listed(cluster: Cluster, deployment: str, folder: str) -> list[str]:
    return list(json.loads(cluster.kubectl("exec", f"deployment/{deployment}", "--", "python", "-c", LIST, folder)))


def size(cluster: Cluster) -> int:
    return int(json.loads(cluster.kubectl("logs", "files").splitlines()[0])["ready"])


def test_a_job_brings_the_model_once_and_workers_that_waited_serve_it(release: Release, cluster: Cluster) -> None:
    release.install()
    assert "HTTP and gRPC agree" in release.test("answers")
    assert "GB/s" in release.test("kv")
    weights = [each for each in sent(cluster) if each["path"] == MODEL]
    print("\n     ", json.dumps(weights), flush=True)
    assert len(weights) == 2, "it was cut off once"
    assert sum(each["sent"] for each in weights) - size(cluster) < 2_000_000, "and gone on with"
    (job,) = cluster.get("jobs", "-l", f"app.kubernetes.io/instance={NAME}")
    assert job["status"]["succeeded"] == 1


def test_routers_have_the_tokenizer_alone_and_nobody_may_write(release: Release, cluster: Cluster) -> None:
    _, routers, prefill, _ = DEPLOYMENTS
    assert listed(cluster, routers, "/models/tiny") == TOKENIZER
    for deployment in (routers, prefill):
        with pytest.raises(AssertionError, match="Read-only file system"):
            cluster.kubectl("exec", f"deployment/{deployment}", "--", "python", "-c", WRITE)


def test_whoever_comes_later_fetches_nothing(release: Release, cluster: Cluster) -> None:
    before = [each for each in sent(cluster) if each["path"] == MODEL]
    release.scale(DEPLOYMENTS[2], 1, 3)
    release.upgrade("--set=weights.retries=5,weights.resources.limits.memory=900Mi")  # another Job
    assert [each for each in sent(cluster) if each["path"] == MODEL] == before


def test_a_folder_of_the_node_is_filled_once_by_workers_that_start_at_the_same_time(
    release: Release, cluster: Cluster
) -> None:
    before = len(sent(cluster))
    own = "--set=weights.cache=hostPath,weights.hostPath.path=" + OTHER_NODE_FOLDER
    release.submit("upgrade", own, *WAIT)
    release.settle()
    assert "HTTP and gRPC agree" in release.test("answers")
    weights = [each for each in sent(cluster)[before:] if each["path"] == MODEL]
    assert [each["sent"] for each in weights] == [size(cluster)], "four workers, one download"


@pytest.mark.parametrize(("source", "image"), [("hub", IMAGE), ("bucket", CPU_IMAGE)], ids=["hub", "bucket"])
def test_another_source_is_another_job_into_another_folder(
    release: Release, cluster: Cluster, source: str, image: str
) -> None:
    if not image:
        pytest.skip("DIPTYCH_E2E_CPU_IMAGE is not set")
    before, folder = len(sent(cluster)), f"/models/{source}"
    release.upgrade(f"--values={Path(__file__).with_name(f'weights_{source}.yaml')}", image=image)
    assert "HTTP and gRPC agree" in release.test("answers")
    weights = [each["sent"] for each in sent(cluster)[before:] if each["path"].endswith("model.safetensors")]
    print("\n     ", json.dumps(weights), flush=True)
    assert sum(weights) == size(cluster), "two workers of each role, one download: of a bucket in pieces"
    assert listed(cluster, DEPLOYMENTS[1], folder) == TOKENIZER
    assert "model.safetensors" in listed(cluster, DEPLOYMENTS[2], folder)


def test_uninstalling(release: Release) -> None:
    release.uninstall()
    assert release.all_pods() == []
