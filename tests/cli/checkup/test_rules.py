"""What a machine is told, fact by fact: a machine that is well is told nothing to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.cli.checkup.rules import GIB, is_fit, judge, report
from diptych.cli.checkup.values import Facts, Level, RdmaPort

WELL = Facts(
    versions={"diptych": "1", "torch": "2.13.0+cpu", "triton": "3"},
    cpu_flags=frozenset({"avx2", "avx512f"}),
    num_cores=8,
    memory_bytes=16 * GIB,
    temporary_free_bytes=GIB,
    shm_bytes=GIB,
    sysv_segment_bytes=1 << 62,
    sysv_bytes=1 << 50,
    files=1 << 20,
    torch_cuda="",
    ucx="1.19 from site",
    compiler="cc",
    clock_is_synchronised=True,
    hostname="here",
    hostname_addresses=("10.0.0.1",),
)
ACTIVE, DOWN = RdmaPort("mlx5_0:1", "ACTIVE", "InfiniBand", "200 Gb/sec"), RdmaPort("mlx5_1:1", "DOWN", "Ethernet")
GPU = replace(  # as PyPI's wheels are: their version does not tell
    WELL,
    versions={**WELL.versions, "torch": "2.13.0"},
    torch_cuda="13.0",
    gpus=("H200", "H200"),
    gpu_driver="580.65.06",
)


UNKNOWN = Facts(versions={"torch": "2"}, compiler="cc", ucx="1", cpu_flags=frozenset({"avx2"}), num_cores=2)
RDMA = replace(GPU, rdma_ports=[ACTIVE], ucx_has_infiniband=True, has_peer_memory=True)


@pytest.mark.parametrize("facts", [WELL, GPU, RDMA, UNKNOWN])
def test_a_machine_that_is_well_is_told_nothing_to_change(facts: Facts) -> None:
    findings = judge(facts)
    assert [finding for finding in findings if finding.change] == []
    assert is_fit(findings)


@pytest.mark.parametrize(
    ("changes", "level", "subject", "change"),
    [
        ({"machine": "aarch64"}, Level.BAD, "cpu", "x86-64"),
        ({"cpu_flags": frozenset({"sse2"})}, Level.BAD, "cpu", "newer machine"),
        ({"num_cores": 1}, Level.NOTE, "cores", "2 or more"),
        ({"governor": "powersave"}, Level.NOTE, "clock rate", "performance"),
        ({"memory_bytes": GIB}, Level.BAD, "memory", "2 GiB"),
        ({"is_cache_writable": False}, Level.BAD, "cache folder", "DIPTYCH_CACHE_DIR"),
        ({"temporary_free_bytes": 0}, Level.BAD, "temporary files", "TMPDIR"),
        ({"compiler": ""}, Level.BAD, "compiler", "ziglang"),
        ({"files": 1024}, Level.NOTE, "open files", "ulimit -Hn"),
        ({"memlock_bytes": 65536, "rdma_ports": [ACTIVE]}, Level.BAD, "locked memory", "IPC_LOCK"),
        ({"shm_bytes": 0}, Level.BAD, "/dev/shm", "--shm-size"),
        ({"sysv_segment_bytes": 33554432}, Level.BAD, "kernel.shmmax", "--transports tcp"),
        ({"sysv_bytes": 100}, Level.BAD, "kernel.shmall", "--transports tcp"),
        ({"ptrace_scope": 3}, Level.NOTE, "ptrace_scope", "ptrace_scope=1"),
        ({"ucx_problem": "no usable UCX"}, Level.BAD, "UCX", "libucx-cu13"),
        ({"rdma_ports": [ACTIVE]}, Level.BAD, "UCX", "DIPTYCH_UCX_PATH"),
        ({"rdma_ports": [ACTIVE, DOWN], "ucx_has_infiniband": True}, Level.NOTE, "RDMA", "ibstat"),
        ({"rdma_ports": [DOWN], "ucx_has_infiniband": True}, Level.BAD, "RDMA", "--transports tcp"),
        ({"rdma_ports": [ACTIVE], "rdma_doors": False}, Level.BAD, "RDMA", "/dev/infiniband"),
        ({"gpu_driver": "580.1"}, Level.BAD, "GPU", "nvidia-smi"),
        ({"clock_is_synchronised": False}, Level.NOTE, "clock", "chrony"),
        ({"server_skew_s": {"http://r": -90.0}}, Level.BAD, "clock", "NTP"),
        ({"hostname_addresses": ()}, Level.NOTE, "DNS", "/etc/hosts"),
        ({"names": {"bootstrap": "unknown"}}, Level.BAD, "DNS", "resolv.conf"),
        ({"versions": {}}, Level.NOTE, "torch", "pip install"),
    ],
)
def test_what_is_not_well_is_told_with_what_to_change(
    changes: dict[str, Any], level: Level, subject: str, change: str
) -> None:
    findings = judge(replace(WELL, **changes))
    told = [
        finding for finding in findings if finding.change and finding.subject == subject and change in finding.change
    ]
    assert [finding.level for finding in told] == [level]
    assert is_fit(findings) == (Level.BAD not in {finding.level for finding in findings})


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"gpu_driver": "570.10"}, "driver"),
        ({"torch_cuda": ""}, "torch"),
        ({"versions": {"torch": "2.13.0"}}, "triton"),
        ({"shm_bytes": 64 << 20}, "/dev/shm"),
    ],
)
def test_a_machine_with_gpus_needs_what_they_need(changes: dict[str, Any], subject: str) -> None:
    bad = [finding.subject for finding in judge(replace(GPU, **changes)) if finding.level is Level.BAD]
    assert bad == [subject]


def test_an_older_driver_is_right_for_an_older_cuda() -> None:
    older = replace(GPU, torch_cuda="12.8", gpu_driver="550.54")
    assert is_fit(judge(older))


def test_the_report_counts_and_says_what_to_change_below_each() -> None:
    text = report(judge(replace(WELL, compiler="", num_cores=1)))
    assert "BAD   compiler" in text
    assert "-> install gcc or clang" in text
    assert text.splitlines()[-1].startswith("1 bad, 2 notes, ")
