"""The kernels under the compiler's sanitizers: their own tests once more, in a process of its own.

Compiling takes half a minute and the tests minutes, so only `make fuzz` does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import sanitized_environment

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).parent


@pytest.mark.skipif("DIPTYCH_FUZZ_EXAMPLES" not in os.environ, reason="takes minutes: `make fuzz`")
def test_the_kernels_touch_nothing_but_their_arrays(tmp_path: Path) -> None:
    others = [str(path) for path in sorted(FOLDER.glob("test_*.py")) if path != Path(__file__)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=1500"]
    ran = subprocess.run(
        [*command, *others, str(FOLDER.parent / "test_page_pack.py")],
        env=sanitized_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
