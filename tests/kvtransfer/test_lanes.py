from __future__ import annotations

import pytest

from diptych.kvtransfer.lanes import Lane, PathRule, Requirement, lane_of, shortfall

PATHS = ("copy", "put", "message")


@pytest.mark.parametrize(
    ("lanes", "path", "lane"),
    [
        ("tcp/eth0", "message", Lane.TCP),
        ("", "put", Lane.TCP),
        ("something/new", "put", Lane.TCP),
        ("tcp/eth0, sysv/memory", "put", Lane.SHM),
        ("posix/memory", "message", Lane.SHM),
        ("rc_mlx5/mlx5_0:1", "put", Lane.RDMA),
        ("srd/efa0", "put", Lane.RDMA),
        ("cuda_ipc/cuda, sysv/memory", "put", Lane.NVLINK),
        ("cuda_ipc/cuda, sysv/memory", "mover", Lane.NVLINK),
        ("tcp/lo", "mover", Lane.NVLINK),
        ("tcp/lo", "copy", Lane.SHM),
        ("cuda_ipc/cuda, tcp/eth0", "staged", Lane.TCP),
        ("cuda_ipc/cuda", "staged", Lane.TCP),
        ("cuda_ipc/cuda, rc_mlx5/mlx5_0:1", "staged", Lane.RDMA),
        ("tcp/eth0", "staged", Lane.TCP),
    ],
)
def test_the_fastest_lane_counts_unless_the_path_says_more(lanes: str, path: str, lane: Lane) -> None:
    assert lane_of(lanes, path) is lane


@pytest.mark.parametrize("requirement", ["any", "shm"])
def test_a_link_that_is_fast_enough_has_no_shortfall(requirement: Requirement) -> None:
    assert shortfall(requirement, "sysv/memory", "put") == ""


def test_a_slower_link_than_required_is_refused_by_what_it_runs_over() -> None:
    words = "its pages go over tcp/eth0 (message), and --kv-require asks for shm"
    assert shortfall("shm", "tcp/eth0", "message") == words


def test_without_wishes_every_path_is_allowed() -> None:
    assert PathRule().allowed(PATHS, "tcp/eth0") == PATHS


def test_a_pinned_path_is_the_only_one() -> None:
    assert PathRule("put").allowed(PATHS, "sysv/memory") == ("put",)
    assert PathRule("mover").allowed(PATHS, "sysv/memory") == ()
    words = "there is no path mover to this peer, as --kv-path asks for; there is: copy, put, message"
    assert PathRule("mover").refusal(PATHS, "sysv/memory") == words


def test_what_is_slower_than_required_is_not_allowed() -> None:
    rule = PathRule("auto", "shm")
    assert rule.allowed(("put", "message"), "tcp/eth0") == ()
    assert rule.allowed(PATHS, "tcp/eth0") == ("copy",)
    assert rule.allowed(PATHS, "sysv/memory") == PATHS
    words = "its pages go over tcp/eth0 (put), and --kv-require asks for shm"
    assert rule.refusal(("put", "message"), "tcp/eth0") == words
