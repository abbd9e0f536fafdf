"""The router's C sources under the compiler's sanitizers: tables of every size, at the end of their memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from sanitizers import sanitized_environment

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).with_name("drive_c.py")
NUM_ROUNDS = int(os.environ.get("DIPTYCH_FUZZ_EXAMPLES", "40"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return sanitized_environment(tmp_path_factory.mktemp("sanitized"))


@pytest.mark.parametrize("seed", [1, 2])
def test_no_word_beside_a_table_is_touched(environment: Mapping[str, str], seed: int) -> None:
    ran = drive(environment, str(seed), str(NUM_ROUNDS))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{NUM_ROUNDS} rounds\n"


def test_a_word_beside_a_table_would_be_noticed(environment: Mapping[str, str]) -> None:
    ran = drive(environment, "beyond")
    assert ran.returncode != 0
    assert "heap-buffer-overflow" in ran.stderr


def drive(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
