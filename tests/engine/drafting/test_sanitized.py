"""The index of suffixes under the compiler's sanitizers: its own tests once more, each table memory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import sanitized_environment

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).parent


@pytest.mark.skipif("DIPTYCH_FUZZ_EXAMPLES" not in os.environ, reason="its tests run unsanitized too: `make fuzz`")
def test_the_index_touches_nothing_but_its_tables(tmp_path: Path) -> None:
    files = [str(FOLDER / name) for name in ("test_suffix_index.py", "test_suffix.py", "test_sources.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=600"]
    ran = subprocess.run(
        [*command, *files], env=sanitized_environment(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
