"""Parts: what is there of files that are not whole yet, beside a note of which bytes they are the beginning of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from diptych.cli.downloads.manifest import ROOM
from diptych.cli.downloads.remote_files import RemoteFile


class Part:
    """The part of one file in a folder, if there is one."""

    def __init__(self, folder: Path, file: RemoteFile) -> None:
        name = file.name.replace("%", "%25").replace("/", "%2F")
        self._file = file
        self.path = folder / ROOM / f"{name}.part"
        self.note = self.path.with_suffix(".of")  # the identity of the bytes

    @property
    def nbytes(self) -> int:
        """How many bytes can be gone on with: none, if they are of others than the origin has now."""
        try:
            is_same = bool(self._file.identity) and self.note.read_text() == self._file.identity
            nbytes = self.path.stat().st_size
        except FileNotFoundError:
            return 0
        return nbytes if is_same and nbytes <= self._file.nbytes else 0

    def begin(self) -> None:
        """Start anew, in a file of its own: who still writes to the old one writes to none."""
        self.forget()
        self.note.write_text(self._file.identity)
        self.path.touch()

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def forget_others(folder: Path, files: Iterable[RemoteFile]) -> None:
    """Delete the parts in a folder that are of no use for any of these files."""
    parts = [part for file in files if (part := Part(folder, file)).nbytes]
    used = {path for part in parts for path in (part.path, part.note)}
    for path in (*(folder / ROOM).glob("*.part"), *(folder / ROOM).glob("*.of")):
        if path not in used:
            path.unlink(missing_ok=True)
