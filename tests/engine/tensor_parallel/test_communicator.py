"""Real collectives between processes: gloo everywhere, NCCL where there are GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from two_gpus import needs_two_gpus

from diptych.v1.rank_pb2 import Meeting

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("communicate.py")


def communicate(store: Path, kind: str) -> list[Any]:
    commands = [(sys.executable, str(SCRIPT), str(rank), "2", str(store), kind) for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output) for output in outputs]


def check(tmp_path: Path, kind: str) -> None:
    first, second = communicate(tmp_path / "store", kind)
    assert first["embedded"]
    assert second["embedded"]
    assert first["worst"] < 1e-5
    assert first["worst_logit"] < 1e-5
    assert second["worst_logit"] is None  # only rank 0 samples
    for rank in (first, second):
        assert (rank["newest"], rank["smallest"]) == ([0, 1, 2], 6)
    assert len({*first["sums"], *second["sums"]}) == 1  # the same bits on every rank, every time


def test_ranks_add_up_to_the_same_bits_over_gloo(tmp_path: Path) -> None:
    check(tmp_path, "cpu")


IMPOSTOR = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=1, world_size=2)
dist.all_to_all_single(torch.empty(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8))
sys.stdin.read()  # gloo aborts a process whose neighbour leaves: this one is told when to
"""


def test_who_takes_the_place_of_a_rank_without_the_secret_gets_nothing_of_the_model(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = [sys.executable, str(SCRIPT), "0", "2", str(store), "cpu"]
    impostor = [sys.executable, "-c", IMPOSTOR, str(store)]
    with (
        subprocess.Popen(impostor, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL),
        subprocess.Popen(first, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank,
    ):
        output, errors = rank.communicate(timeout=60)
    assert "who connected as rank 1 is none" in errors
    assert rank.returncode, "it goes on"  # not always 1: gloo may abort a process on its way out
    assert output == ""


NODE = """
import sys, torch
from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import StoreMeeting
from diptych.v1.rank_pb2 import Meeting
rank = int(sys.argv[1])
if rank == 0:
    meeting, where = StoreMeeting.open("127.0.0.1", "lo", 2)
    print(where.SerializeToString().hex(), flush=True)
else:
    meeting = StoreMeeting.join(Meeting.FromString(bytes.fromhex(sys.argv[2])), "lo", 2)
communicator = TorchCommunicator(rank, 2, meeting, torch.device("cpu"))
print("met", flush=True)
sys.stdin.read()
"""


def test_a_stranger_who_reads_all_of_the_store_of_nodes_does_not_find_the_secret() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", NODE, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        return rank.stdout.readline().strip()

    with start("0") as first:
        told = said(first)
        with start("1", told) as second:
            assert (said(first), said(second)) == ("met", "met")
            where = Meeting.FromString(bytes.fromhex(told))
            store = TCPStore(where.host, where.port, None, False, timedelta(seconds=60), wait_for_workers=False)
            found = {key: store.get(key) for key in store.list_keys()}
    assert len(found) == 2, "the addresses of both"
    assert not any(where.secret in value or where.secret.hex().encode() in value for value in found.values())


@pytest.mark.gpu
@needs_two_gpus
def test_ranks_add_up_to_the_same_bits_over_nccl(tmp_path: Path) -> None:
    check(tmp_path, "cuda")
