"""A drill that is told to end takes everything with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
MARK = "DIPTYCH_TEST_DRILL"
TIMEOUT_S = 200

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def started_by(drill: Path) -> Iterator[psutil.Process]:
    """Every process that has the drill's mark in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(drill):
                yield process


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For logs; that of the drill itself is to be read while it is written. Ends what a failed test leaves."""
    os.mkfifo(tmp_path / "drill.log")
    yield tmp_path
    for process in started_by(tmp_path):
        process.kill()


def test_a_drill_that_is_ended_leaves_no_process_not_even_a_frozen_one(folder: Path) -> None:
    """By Ctrl-C, which a job in the background has to ask for; SIGTERM has the same handler."""
    options = ["--device", "sim", "--logs", str(folder), "--scenario", "kills"]
    drill = subprocess.Popen(
        [sys.executable, str(CHAOS), *options], env={**os.environ, MARK: str(folder)}, stderr=subprocess.DEVNULL
    )
    with (folder / "drill.log").open() as log:
        assert any("scenario kills" in line for line in log)
        components = [each for each in started_by(folder) if each.pid != drill.pid]
        assert len(components) >= 8
        components[-1].suspend()
        drill.send_signal(signal.SIGINT)
        assert drill.wait(TIMEOUT_S) != 0
    _, left = psutil.wait_procs(list(started_by(folder)), TIMEOUT_S)
    assert left == []
