"""Workers over several nodes: what the chart makes of them in clusters with LeaderWorkerSets and without."""

from __future__ import annotations

from typing import Any

import chart
import pytest
import yaml
from chart import Objects, objects

NAME = "r-diptych-decode"
API = "leaderworkerset.x-k8s.io/v1"


def group(replicas: int = 1, **nodes: Any) -> Objects:
    """Render with a decode pool whose workers are groups."""
    own = {"replicas": replicas, "options": {"tp": 4}, "nodes": {"count": 2, **nodes}}
    return objects(yaml.safe_dump({"decode": {"pools": [{"name": "default", **own}]}}))


def worker(template: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments and the environment of the first container of a pod template."""
    container = template["spec"]["containers"][0]
    return container["args"], {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_a_leader_worker_set_starts_all_pods_of_a_group_again_as_one_and_keeps_them_together() -> None:
    found = group(3, kind="LeaderWorkerSet", exclusiveTopology="rack")[f"LeaderWorkerSet/{NAME}"]
    assert found["apiVersion"] == API
    assert found["metadata"]["annotations"] == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}
    spec = found["spec"]
    assert set(spec) == {"replicas", "startupPolicy", "rolloutStrategy", "networkConfig", "leaderWorkerTemplate"}
    template = spec["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "workerTemplate"}
    assert (spec["replicas"], template["size"], template["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    arguments, environment = worker(template["workerTemplate"])
    assert {"--nnodes=2", "--leader=$(LWS_LEADER_ADDRESS):7100", "--port=7100", "--tp=4"} <= set(arguments)
    number = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert environment["DIPTYCH_NODE_RANK"] == {"fieldRef": {"fieldPath": number}}


def test_without_leader_worker_sets_each_worker_is_a_stateful_set_whose_pods_find_the_first_by_its_name() -> None:
    found = group(2)
    for number in range(2):
        spec = found[f"StatefulSet/{NAME}-{number}"]["spec"]
        assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
        assert spec["updateStrategy"] == {"type": "OnDelete"}
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert spec["selector"]["matchLabels"]["diptych.io/group"] == str(number)
        arguments, environment = worker(spec["template"])
        assert f"--leader={NAME}-{number}-0.{NAME}-nodes:7100" in arguments
        number_of_pod = "metadata.labels['apps.kubernetes.io/pod-index']"
        assert environment["DIPTYCH_NODE_RANK"] == {"fieldRef": {"fieldPath": number_of_pod}}
    service = found[f"Service/{NAME}-nodes"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"].items() <= labels.items()


def test_what_the_cluster_offers_decides_unless_it_is_said() -> None:
    values = yaml.safe_dump({"workers": {"options": {"tp": 2}, "nodes": {"count": 2}}})
    made = chart.run("template", "r", str(chart.CHART), "--namespace=ns", f"--api-versions={API}", values=values)
    assert made.returncode == 0, made.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(made.stdout) if each]
    assert kinds.count("LeaderWorkerSet") == 2
    assert "StatefulSet" not in kinds


def test_a_worker_of_one_pod_is_told_of_no_nodes() -> None:
    found = objects()
    arguments, environment = worker(found[f"Deployment/{NAME}"]["spec"]["template"])
    assert not [each for each in arguments if "nnodes" in each or "leader" in each]
    assert "DIPTYCH_NODE_RANK" not in environment


def timing(values: dict[str, Any], **own: Any) -> tuple[list[str], int]:
    """Return how long a node of a group waits for others, by its arguments, and the seconds in which it may start."""
    pool = {"name": "default", "nodes": {"count": 2}, "options": {"tp": 4}, **own}
    found = objects(yaml.safe_dump({**values, "decode": {"pools": [pool]}}))
    container = found[f"StatefulSet/{NAME}-0"]["spec"]["template"]["spec"]["containers"][0]
    probe = container["startupProbe"]
    waits = [each for each in container["args"] if each.startswith("--node-wait-s")]
    return waits, probe["periodSeconds"] * probe["failureThreshold"]


def test_a_leader_waits_for_nodes_that_still_fetch_their_weights_and_has_its_time_to_load_behind_that() -> None:
    fetched = {"model": {"fetch": {"image": "i", "seconds": 7200}}}
    assert timing({}, startupSeconds=1000) == (["--node-wait-s=1000"], 2000)
    assert timing(fetched, startupSeconds=1000) == (["--node-wait-s=8200"], 9200)


def test_a_groups_own_wait_is_said_once_and_its_probe_waits_as_long() -> None:
    own = {"tp": 4, "nodeWaitS": 50}
    assert timing({}, startupSeconds=1000, options=own) == (["--node-wait-s=50"], 1050)


def test_the_pods_of_a_group_reach_each_other_at_any_port_and_strangers_do_not() -> None:
    """Ranks choose their ports as transfers do."""
    policy = group()["NetworkPolicy/r-diptych-worker"]["spec"]
    labels = group()[f"StatefulSet/{NAME}-0"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (from_workers,) = [each for each in policy["ingress"] if "ports" not in each]
    (peer,) = from_workers["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert expression["values"] == ["worker"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"options": {"tp": 3}}, "options.tp 3 can't be divided among 2 nodes"),
        ({"options": {"tp": 1, "pp": 3}}, "options.pp 3 can't be divided among 2 nodes"),
        ({"options": {"tp": 2, "pp": 3}}, "a node would have 3 ranks, and a stage lie on two nodes"),
        ({"options": {"tp": 2, "dp": 2}}, "options.dp is 2, but a worker over several nodes has one scheduler"),
        ({"autoscaling": {"hpa": {"enabled": True}}}, "autoscaling is for workers of one pod"),
        ({"gpu": {"count": 4}}, "make 2 processes on each of 2 nodes, each with one GPU"),
        ({"nodes": {"count": 2, "exclusiveTopology": "rack"}}, "nodes.exclusiveTopology is for a LeaderWorkerSet"),
        ({"options": {"tp": 4, "nodeRank": 1}}, "additional properties 'nodeRank' not allowed"),
    ],
)
def test_what_can_be_no_group_is_refused(values: dict[str, Any], words: str) -> None:
    own = {"options": {"tp": 4}, "nodes": {"count": 2}, **values}
    found = chart.template(yaml.safe_dump({"decode": {"pools": [{"name": "default", **own}]}}))
    assert found.returncode != 0
    assert words in found.stderr
