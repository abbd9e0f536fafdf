"""Files for operators that a scheduler leaves on its machine: in a folder that is our user's alone, and never many."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from diptych.common.errors import Unavailable

FRESH_S: Final = 300.0  # so old a file has been seen by whoever asked all processes of a machine for theirs


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
    return folder / f"{_own_prefix(name)}{round(1000 * at_s)}{suffix}", at_s


def _own_prefix(name: str) -> str:
    return f"{name}-{os.getpid()}-"


def sweep(folder: Path, name: str, most: int) -> None:
    """Remove what `surplus` finds. Others may sweep the same folder at the same time."""
    written_s = dict[str, float]()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            written_s[path.name] = path.stat().st_mtime
    for each in surplus(written_s, _own_prefix(name), most, time.time()):
        (folder / each).unlink(missing_ok=True)


def surplus(written_s: Mapping[str, float], own: str, most: int, now_s: float) -> set[str]:
    """Return which files should go, by their names and when they were written: the oldest but `most`.

    Those that begin with `own` count by themselves. Others' go only when they aren't fresh, however many there are: all
    processes may have been asked for one at once.
    """
    names = sorted(written_s, key=lambda name: written_s[name])
    mine = [name for name in names if name.startswith(own)]
    old = [name for name in names[:-most] if written_s[name] < now_s - FRESH_S]
    return {*mine[:-most], *old}
