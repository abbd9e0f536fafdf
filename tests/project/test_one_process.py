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
from one_process import FIXTURES, FOLDERS, OneProcess

TESTS = Path(__file__).parents[1]
NOTHING = [sys.executable, "-c", ""]


def posix_spawn() -> None:
    os.waitpid(os.posix_spawn(sys.executable, NOTHING, {}), 0)


def spawn() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()


def load_ucx() -> None:
    with pytest.raises(OSError, match="libucp-not-there"):
        ctypes.CDLL("libucp-not-there.so.0")


STARTS: dict[str, Callable[[], object]] = {
    "subprocess.Popen": lambda: subprocess.run(NOTHING, check=True),
    "multiprocessing": spawn,
    "os.posix_spawn": posix_spawn,
    "os.system": lambda: os.system("true"),
    "UCX": load_ucx,
}


@pytest.mark.parametrize(("name", "start"), STARTS.items(), ids=STARTS)
def test_a_unit_test_that_starts_a_process_or_opens_ucx_fails(
    name: str, start: Callable[[], object], one_process: OneProcess
) -> None:
    start()
    with pytest.raises(pytest.fail.Exception, match=f"a unit test starts {name}.*: mark it as"):
        one_process.check()
    assert one_process.taken() == []


@pytest.mark.integration
def test_an_integration_test_starts_what_it_wants(one_process: OneProcess) -> None:
    for start in STARTS.values():
        start()
    assert one_process.taken() == []


def test_what_makes_an_integration_test_is_there() -> None:
    assert [folder for folder in FOLDERS if not (TESTS / folder).is_dir()] == []
    helpers = "\n".join(path.read_text() for path in TESTS.rglob("conftest.py"))
    assert [fixture for fixture in FIXTURES if f"def {fixture}(" not in helpers] == []
