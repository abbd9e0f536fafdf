"""What a transport says on a host whose shared memory is used up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

OPEN = """
from diptych.common.errors import DiptychError
from diptych.kvtransfer.ucx import UcxOptions, open_transport
try:
    open_transport(1, options=UcxOptions({transports!r})).close()
    print("opened")
except DiptychError as error:
    print(error)
"""
LIMIT = (
    "mount -t tmpfs -o size=64k tmpfs /dev/shm; echo 65536 > /proc/sys/kernel/shmmax; echo 16 > /proc/sys/kernel/shmall"
)


def opened(transports: str) -> str:
    """Return what opening says, in a namespace with little shared memory of either kind."""
    script = f'{LIMIT} && exec "$0" -c "$1"'
    command = ["unshare", "-m", "-i", "sh", "-c", script, sys.executable, OPEN.format(transports=transports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if os.geteuid() or "ermi" in done.stderr:
        pytest.skip("a namespace needs root")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_host_without_shared_memory_is_told_and_told_of_tcp() -> None:
    assert "is System V shared memory used up (ipcs -lm)? --transports tcp needs none" in opened("auto")
    assert opened("tcp") == "opened\n"
