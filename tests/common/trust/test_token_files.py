"""Folders with secrets go, whatever ends their process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from diptych.common.trust.token_files import private_folder

KILLED = (
    "import os, signal\n"
    "from diptych.common.trust.token_files import private_folder\n"
    "with private_folder() as folder:\n"
    "    (folder / 'token').write_text('secret')\n"
    "    print(folder, flush=True)\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.integration
def test_the_folder_of_a_killed_process_goes_with_the_next_one_that_is_made(temporary: Path) -> None:
    command = (sys.executable, "-c", KILLED)
    left = Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False).stdout.strip())
    with private_folder():
        assert left.exists(), "as young as one that its process has not locked yet"
    os.utime(left, (0, 0))
    with private_folder():
        assert not left.exists()
    assert not list(temporary.iterdir())


def test_a_folder_whose_process_lives_stays_however_old_it_is(temporary: Path) -> None:
    with private_folder() as first:
        os.utime(first, (0, 0))
        with private_folder() as second:
            assert first.exists()
            assert second.parent == temporary
