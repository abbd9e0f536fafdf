"""Unit tests are held to one process: `tests/support/one_process.py`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from one_process import FIXTURES, FOLDERS

TESTS = Path(__file__).parents[1]
NOTHING = [sys.executable, "-c", ""]
STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(NOTHING, check=True),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "fork": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    "posix_spawn": lambda: os.posix_spawn(sys.executable, NOTHING, {}),
    "shell": lambda: os.system("true"),
    "UCX": lambda: ctypes.CDLL("libucp.so.0"),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_unit_test_that_starts_a_process_or_opens_ucx_fails(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"a unit test .*: mark it as `@pytest.mark.integration`"):
        start()


@pytest.mark.integration
def test_an_integration_test_starts_what_it_wants() -> None:
    assert subprocess.run(NOTHING, check=True).returncode == 0


def test_what_makes_an_integration_test_is_there() -> None:
    assert [folder for folder in FOLDERS if not (TESTS / folder).is_dir()] == []
    helpers = "\n".join(path.read_text() for path in TESTS.rglob("conftest.py"))
    assert [fixture for fixture in FIXTURES if f"def {fixture}(" not in helpers] == []
