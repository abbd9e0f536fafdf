"""Objects as files of a directory, which may be shared: on one disk, or over NFS.

Rule: a file is written beside its place, synchronised, and linked or moved there. So it is never seen in part, and who
links it first has the name: that is atomic for all processes of all machines.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

BESIDE: Final = ".beside"  # folder of files that are being written
STALE_S: Final = 7 * 86400.0  # then nobody is writing it any more


class _Writer:
    def __init__(self, beside: Path, place: Path) -> None:
        self._beside, self._place = beside, place
        self._file = beside.open("xb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def close(self) -> None:
        _sync_and_close(self)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._beside.replace(self._place)
        _sync_folder(self._place.parent)

    def abort(self) -> None:
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _sync_and_close(writer: _Writer) -> None:
    try:
        writer.sync()
    except OSError:  # a full disk says so here
        writer.abort()
        raise


class Directory:
    """Implements `BatchStore`."""

    def __init__(self, path: str) -> None:
        """Raises `OSError`."""
        self._root = Path(path).resolve()
        self._beside = self._root / BESIDE
        self._beside.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()

    def create(self, name: str, data: bytes) -> bool:
        place = self._root / name
        if place.exists():
            return False
        beside = self._new_beside()
        writer = _Writer(beside, place)
        try:
            writer.write(data)
            _sync_and_close(writer)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(beside, place)
        except FileExistsError:
            return False
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(place.parent)
        return True

    def writer(self, name: str) -> _Writer:
        return _Writer(self._new_beside(), self._root / name)

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if nbytes is None else nbytes)

    def names(self, folder: str) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._root / folder) if entry.is_file()]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _new_beside(self) -> Path:
        return self._beside / secrets.token_hex(16)

    def _sweep(self) -> None:
        """Delete what processes left that died while they wrote: by the clock of who has the files."""
        new = self._new_beside()
        new.touch(mode=0o600)
        now_s = new.stat().st_mtime
        new.unlink()
        for each in self._beside.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if now_s - each.stat().st_mtime > STALE_S:
                    each.unlink()


def _sync_folder(folder: Path) -> None:
    """The name is there for good, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
