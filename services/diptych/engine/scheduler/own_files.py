"""Files for operators that a scheduler leaves on its machine: in a folder that is our user's alone, and never many."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from diptych.common.errors import Unavailable


def own_folder(kind: str) -> Path:
    """Return our user's folder below `TMPDIR`, which nobody else may read or write. Raises `Unavailable`."""
    folder = Path(tempfile.gettempdir(), f"diptych-{kind}-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        seen = folder.lstat()
    except OSError as error:
        raise Unavailable(
            f"{folder} can't be made: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from None
    if seen.st_uid != os.geteuid() or seen.st_mode & 0o077 or folder.is_symlink():
        raise Unavailable(f"{folder} is open to others: remove it, or set TMPDIR to a folder that is yours")
    return folder


def new_file(folder: Path, name: str, suffix: str) -> tuple[Path, float]:
    """Return a path that nobody has, and the time that stands in it: seconds since 1970, for people."""
    at_s = time.time()
    return folder / f"{name}-{os.getpid()}-{round(1000 * at_s)}{suffix}", at_s


def sweep(folder: Path, most: int) -> None:
    """Remove the oldest files but so many."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-most]:
        path.unlink(missing_ok=True)
