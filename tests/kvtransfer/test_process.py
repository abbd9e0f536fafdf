"""When a process counts as gone: a wrong yes lets a writer scribble over pages that were given to somebody else."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from diptych.kvtransfer.process import ProcessIdentity, is_gone, is_visible, own_identity

SAY_WHO = """
import dataclasses, json, sys
from diptych.kvtransfer.process import own_identity
print(json.dumps(dataclasses.asdict(own_identity())), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    with subprocess.Popen(
        [sys.executable, "-c", SAY_WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield process, ProcessIdentity(**json.loads(process.stdout.readline()))
        process.kill()


def test_we_are_here() -> None:
    assert is_visible(own_identity())
    assert not is_gone(own_identity())


@pytest.mark.integration
def test_a_process_is_gone_when_it_was_killed_even_before_its_parent_looks(
    child: tuple[subprocess.Popen[str], ProcessIdentity],
) -> None:
    process, identity = child
    assert not is_gone(identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # looks without reaping: it stays a zombie
    assert is_gone(identity)


@pytest.mark.integration
def test_a_stopped_process_is_not_gone(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    process.send_signal(signal.SIGSTOP)
    assert not is_gone(identity)


def test_a_pid_that_is_used_again_is_another_process() -> None:
    assert is_gone(dataclasses.replace(own_identity(), start_ticks=1))


def test_other_containers_and_hosts_are_out_of_sight() -> None:
    own = own_identity()
    assert not is_visible(dataclasses.replace(own, pid_namespace="pid:[1]"))
    assert not is_visible(dataclasses.replace(own, host="elsewhere"))
