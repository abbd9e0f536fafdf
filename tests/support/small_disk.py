"""A file system that is soon full, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, num_bytes: int) -> Iterator[Path]:
    """Mount memory of so many bytes at `place`; skips the test where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, timeout=200, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=200)


def files(place: Path) -> list[str]:
    """Return the names of what is kept there, folders apart."""
    return sorted(path.name for path in place.rglob("*") if path.is_file())
