"""Scenarios of the drill once, short, and with simulated models. `make chaos` plays all, and long, on CPUs.

`tests/platform/test_disturbances.py` kills what `kills` does; here that is played with `DIPTYCH_DEEP_CHECKS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drill.drill import SHORT

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
DEEP = ("kills",) if os.environ.get("DIPTYCH_DEEP_CHECKS") else ()
NOBODY_FAILS = ("rolling-restart", *DEEP, "no-bootstrap", "same-address", "reconfigure", "intruder")
SCENARIOS = (*NOBODY_FAILS, "faults")
TIMEOUT_S = 2400  # only for what hangs

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Counts and problems of each scenario, played one after another on one platform."""
    options = ["--device", "sim", "--json", "--logs", str(tmp_path_factory.mktemp("drill")), "--scenario", *SCENARIOS]
    ended = subprocess.run([sys.executable, str(CHAOS), *options], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    outcomes: dict[str, Any] = json.loads(ended.stdout)
    return outcomes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_answer_is_wrong_no_request_is_lost_and_nothing_is_left(outcomes: dict[str, Any], scenario: str) -> None:
    counts, problems = outcomes[scenario]["counts"], outcomes[scenario]["problems"]
    print(*(f"{name:40} {count:>8}" for name, count in counts.items()), sep="\n")
    assert problems == []
    assert counts["answered"] + counts["left by their clients"] + counts["failed"] == counts["offered"]
    assert counts["answered"] >= SHORT.answers
    assert counts["pages moved"] >= counts["answered by pairs"] > 0
    assert counts["failed"] == 0 or scenario not in NOBODY_FAILS
