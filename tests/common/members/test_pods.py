from __future__ import annotations

from typing import Any

from diptych.common.members.pods import Pod, pods_of, unregistered, vanished
from diptych.v1.bootstrap_pb2 import GroupNode, Instance


def endpoint(name: str, address: str, kind: str = "Pod", **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": kind, "name": name}}


def test_pods_are_those_of_all_slices_and_not_told_is_ready() -> None:
    slices: list[dict[str, Any]] = [
        {
            "endpoints": [
                endpoint("a", "10.0.0.1", ready=True),
                endpoint("b", "10.0.0.2", ready=False, terminating=True),
            ]
        },
        {"endpoints": [endpoint("c", "10.0.0.3"), endpoint("n", "10.0.0.4", "Node"), {"addresses": ["10.0.0.5"]}]},
        {"endpoints": None},
    ]
    assert pods_of(slices) == {
        "a": Pod("a", "10.0.0.1", True),
        "b": Pod("b", "10.0.0.2", False),
        "c": Pod("c", "10.0.0.3", True),
    }


PODS = {"a": Pod("a", "10.0.0.1", True)}


def test_only_who_is_retained_and_whose_pod_was_there_and_is_no_more_has_vanished() -> None:
    retained = [Instance(instance_id=1, pod="a"), Instance(instance_id=2, pod="gone"), Instance(instance_id=3)]
    retained.append(Instance(instance_id=4, pod="never seen"))
    assert vanished(retained, {"a", "gone"}, PODS) == {2}


def test_a_pod_of_which_no_member_says_that_it_is_there_is_unregistered() -> None:
    pods = {**PODS, "b": Pod("b", "10.0.0.2", False)}
    assert unregistered(pods, [Instance(instance_id=1, pod="a")]) == [Pod("b", "10.0.0.2", False)]


def test_the_pods_of_a_groups_nodes_are_its_members() -> None:
    group = Instance(instance_id=1, pod="a", nodes=[GroupNode(pod="a"), GroupNode(node=1, pod="b")])
    pods = {name: Pod(name, "10.0.0.1", True) for name in ("a", "b", "c")}
    assert [pod.name for pod in unregistered(pods, [group])] == ["c"]
