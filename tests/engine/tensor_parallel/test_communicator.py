"""Real collectives between processes: gloo everywhere, NCCL where there are GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_add_up_to_the_same_bits_over_nccl(tmp_path: Path) -> None:
    check(tmp_path, "cuda")
