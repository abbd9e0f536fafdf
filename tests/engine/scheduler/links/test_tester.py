"""Links of the real transfer engine, tested as workers test them: in host memory and in (emulated) device memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

SCRIPT = str(Path(__file__).with_name("link_tester_side.py"))


class Side:
    """A process with one end of the link."""

    def __init__(self, role: str, *options: str) -> None:
        command = [sys.executable, SCRIPT, role, *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def end(self) -> None:
        """Idempotent."""
        if self._process.poll() is None:
            self._process.communicate(timeout=200)


def verdicts(transports: str, device: str = "", pinned: str = "auto", requirement: str = "any") -> list[Any]:
    """Let two processes test the link between them; return what the writer and then the reader says."""
    writer = Side("writer", transports, device, pinned, requirement)
    reader = Side("reader", transports, device, "auto", "any")
    ours, theirs = writer.read(), reader.read()
    writer.write(theirs)
    reader.write(ours)
    said = [json.loads(writer.read())]
    if said[0]["kind"] == "Failed":
        writer.end()  # a worker closes such a link
    said.append(json.loads(reader.read()))
    for side in (writer, reader):
        side.end()
    return said


@pytest.mark.parametrize(
    ("transports", "device", "paths"),
    [
        ("shm", "", ["copy", "put", "message"]),
        ("tcp", "", ["message"]),
        ("shm", "emulated", ["mover", "staged"]),
    ],
)
def test_every_path_of_a_link_is_tried_and_measured(transports: str, device: str, paths: list[str]) -> None:
    passed, heard = verdicts(transports, device)
    assert [(result["path"], result["error"]) for result in passed["results"]] == [(path, "") for path in paths]
    assert all(result["bytes_per_s"] > 0 for result in passed["results"])
    assert passed["kind"] == heard["kind"] == "Passed"
    assert passed["used"] == passed["path"] == heard["path"]
    assert heard["bytes_per_s"] == passed["bytes_per_s"]


def test_a_pinned_path_is_the_one_that_is_used() -> None:
    passed, _ = verdicts("shm", pinned="put")
    assert [result["path"] for result in passed["results"]] == ["put"]
    assert passed["used"] == "put"


def test_a_slower_link_than_required_is_refused_before_it_is_tested() -> None:
    failed, nothing = verdicts("tcp", requirement="shm")
    assert failed["kind"] == "Failed"
    assert failed["reason"].startswith("its pages go over tcp/")
    assert failed["results"] == []
    assert nothing is None or nothing["reason"] == "no link: it is not up"  # what the reader hears of first
