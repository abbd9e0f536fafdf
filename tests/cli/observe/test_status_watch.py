"""`diptych status --watch`, as somebody looks at it while bootstrap comes and goes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from diptych.cli.observe.status import CLEAR, StatusConfig
from diptych.common.errors import ConfigError
from diptych.common.net.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run a command of ours; its standard output can be read."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "diptych.cli", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def read_until(shown: IO[str] | None, words: str) -> None:
    """Read lines up to one with these words; a command that ends, or never says them, fails the test."""
    assert shown is not None
    assert any(words in line for line in shown), f"it ended without {words!r}"


def test_it_shows_what_is_there_again_and_again_whatever_is_away_until_ctrl_c(start: Start) -> None:
    port = str(free_port())
    status = start("status", f"--bootstrap=127.0.0.1:{port}", "--watch=0.05")
    read_until(status.stdout, CLEAR)
    read_until(status.stdout, "can't ask bootstrap at 127.0.0.1")
    bootstrap = start("bootstrap", f"--port={port}", "--health-port=0")
    read_until(status.stdout, "no member is registered")
    bootstrap.kill()
    read_until(status.stdout, "can't ask bootstrap at 127.0.0.1")
    status.send_signal(signal.SIGINT)
    assert status.wait(200) == 130


@pytest.mark.parametrize("options", [{"watch": 0.0}, {"watch": -1.0}, {"watch": 1.0, "json": True}])
def test_what_can_not_be_watched_is_refused(options: dict[str, float | bool]) -> None:
    with pytest.raises(ConfigError, match="--watch takes seconds"):
        StatusConfig(**options).validate()  # type: ignore[arg-type]
