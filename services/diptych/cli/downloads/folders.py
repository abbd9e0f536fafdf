"""Files of a folder of this machine, as of a share that is slow to read: copied, and proven by its SHA256SUMS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from diptych.cli.downloads.remote_files import SUMS, Digest, Interrupted, Listing, RemoteFile, read_sums
from diptych.common.errors import ConfigError

CHUNK: Final = 1 << 20


class Folder:
    """Implements `Origin`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def listed(self) -> Listing:
        if not self._path.is_dir():
            raise ConfigError(f"there is no folder {self._path}")
        listed = self._path / SUMS
        sums = read_sums(listed.read_text(errors="replace")) if listed.is_file() else {}
        paths = sorted(path for path in self._path.rglob("*") if path.is_file())
        named = {path.relative_to(self._path).as_posix(): path for path in paths}
        return Listing(tuple(_file(name, path, sums.get(name)) for name, path in named.items() if name != SUMS))

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        try:
            with (self._path / file.name).open("rb") as source:
                source.seek(offset)
                while data := source.read(CHUNK):
                    yield data
        except OSError as error:
            raise Interrupted(f"{error.filename}: {error.strerror}") from None


def _file(name: str, path: Path, digest: str | None) -> RemoteFile:
    told = path.stat()
    identity = digest or f"{told.st_ino} {told.st_mtime_ns}"
    return RemoteFile(name, told.st_size, identity, Digest("sha256", digest) if digest else None)
