"""How many connections fit the descriptors of a process, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import resource
from diptych.common.net.descriptors import connections_within, use_all_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
before = connections_within(8192)
use_all_descriptors()
print(before, connections_within(8192), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected", "is_told"),
    [(64, 64, [21, 21, 64], True), (256, 1000, [85, 333, 1000], True), (256, 2048, [85, 682, 2048], False)],
)
def test_a_process_takes_all_descriptors_says_when_they_are_few_and_gives_a_port_a_part(
    soft: int, hard: int, expected: list[int], is_told: bool
) -> None:
    script = SCRIPT.format(soft=soft, hard=hard)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    assert list(map(int, run.stdout.split())) == expected
    assert (f"only {hard} files may be open" in run.stderr) == is_told
