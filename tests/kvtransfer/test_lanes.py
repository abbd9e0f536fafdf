from __future__ import annotations

import pytest

from diptych.kvtransfer.lanes import Lane, Requirement, lane_of, shortfall


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
