"""Sums through peers' memory between real processes, on two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from two_gpus import needs_two_gpus

pytestmark = pytest.mark.integration

SCRIPT: Final = Path(__file__).with_name("sum_with_peers.py")


@pytest.mark.gpu
@needs_two_gpus
def test_sums_have_the_bits_of_nccl_and_of_the_reference_in_a_row_in_graphs_and_with_late_ranks(tmp_path: Path) -> None:
    commands = [(sys.executable, str(SCRIPT), str(rank), "2", str(tmp_path / "store")) for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [json.loads(output) for output in outputs] == [{"wrong": {}, "late": 0}] * 2
