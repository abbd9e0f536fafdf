from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.cli.measure.bench import BenchConfig
from diptych.cli.requests.kv_bench import Report, Row, as_text
from diptych.common.errors import ConfigError

pytestmark = pytest.mark.integration

COMMAND = (sys.executable, "-m", "diptych.cli", "bench", "kv")
SMALL = ("--pool-mib", "4", "--transports", "shm")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *SMALL, *options], capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def peer() -> Iterator[str]:
    """The address of a process that serves."""
    ignores = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by a shell's background jobs, as by this child
    server = subprocess.Popen([*COMMAND, *SMALL, "--serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ignores)
    assert server.stdout is not None
    words = server.stdout.readline().split()
    try:
        yield words[-1]
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=200)
        assert server.returncode == 0
    finally:
        server.kill()


def test_every_path_is_measured_with_every_piece_size_and_verified(peer: str) -> None:
    answer = run("--peer", peer, "--piece-kib", "16,64", "--rounds", "1", "--json")
    report: dict[str, Any] = json.loads(answer.stdout)
    assert [(row["path"], row["piece_kib"], row["is_intact"]) for row in report["rows"]] == [
        (path, size, True) for path in ("copy", "message") for size in (16, 64)
    ]
    assert all(row["gb_per_s"] > 0 and row["memcpy_gb_per_s"] > 0 for row in report["rows"])
    assert report["rtt_us"] > 0
    assert answer.returncode == 0
    assert "WRONG" not in run("--peer", peer, "--piece-kib", "16", "--rounds", "1").stdout  # a server serves many


def test_nobody_at_the_address_is_said_in_words() -> None:
    answer = run("--peer", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "nobody to measure with at 127.0.0.1:1" in answer.stderr
    assert "`diptych bench kv --serve` starts the other end" in answer.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"serve": True, "peer": "a:1"},
        {"peer": "a:1", "piece_kib": (24,)},
        {"peer": "a:1", "piece_kib": ()},
        {"peer": "a:1", "pool_mib": 1, "piece_kib": (2048,)},
        {"peer": "a:1", "rounds": 0},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchConfig(what="kv", **options).validate()


def test_wrong_bytes_are_shouted_about() -> None:
    good, bad = Row("copy", 16, 4.0, 4.0, True), Row("put", 16, 9.0, 4.0, False)
    report = Report("tcp/lo", "UCX 1.22.0", 80.0, (good, bad))
    lines = as_text(report).splitlines()
    assert lines[-2:] == [
        "copy         16 KiB     4.00     4.00   1.00",
        "put          16 KiB     9.00     4.00   2.25  WRONG BYTES",
    ]
    assert not report.is_intact
