"""Requests under a fault every second. `make chaos` runs the thousand; here are as many as fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
NUM_REQUESTS = int(os.environ.get("DIPTYCH_CHAOS_REQUESTS", "200"))

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]


@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_faults_cost_no_token_no_page_and_no_room(tmp_path: Path, transports: str) -> None:
    command = [sys.executable, str(CHAOS), "--json", "--requests", str(NUM_REQUESTS), "--transports", transports]
    drill = subprocess.run([*command, "--logs", str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=590)
    outcome = json.loads(drill.stdout)
    counts, problems = outcome["counts"], outcome["problems"]
    print(*(f"{name:32} {count:>8}" for name, count in counts.items()), sep="\n")
    assert problems == []
    assert counts["answered"] + counts["left by their clients"] + counts["failed"] == counts["offered"] == NUM_REQUESTS
    assert counts["answered"] > NUM_REQUESTS / 2
    assert counts["pages moved"] > counts["answered"]
