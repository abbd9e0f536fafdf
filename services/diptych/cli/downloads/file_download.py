"""One file: bytes go to a part beside the folder's files, which the next try or process goes on with.

Rule: a file has its name only after its bytes were proven and are on the disk. A part is gone on with only if the
origin says that it is of the same bytes; it is hashed first, and what comes then is hashed as it comes. Bytes are
written to their own place: another process that writes late writes what is there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from diptych.cli.downloads.manifest import Entry, settle
from diptych.cli.downloads.parts import Part
from diptych.cli.downloads.progress import Progress
from diptych.cli.downloads.remote_files import Digest, Hasher, Interrupted, Origin, RemoteFile
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

TRIES: Final = 6  # in a row without a byte
FIRST_PAUSE_S: Final = 0.5  # doubled for each of them
LONGEST_PAUSE_S: Final = 30.0
CHUNK: Final = 1 << 20


class FileDownload:
    """Brings a file of an origin into a folder. `check` raises what ends all work."""

    def __init__(
        self, origin: Origin, file: RemoteFile, folder: Path, progress: Progress, check: Callable[[], None]
    ) -> None:
        self._origin, self._file, self._progress, self._check = origin, file, progress, check
        self._path = folder / file.name
        self._part = Part(folder, file)

    def run(self, known: Entry | None) -> Entry:
        """Return what is there afterwards. `known`: what was proven to be there before.

        Raises `ConfigError` for bytes that are wrong, `Interrupted` where nothing comes any more, `OSError` of a disk.
        """
        found = self._found(known)
        if found is not None:
            self._progress.found(self._file.nbytes)
            return found
        entry = self._fetch() or self._fetch()  # what a process before left may be damaged: then all of it, once
        if entry is None:
            raise ConfigError(self._wrong)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        settle(self._part.path, self._path)
        self._part.note.unlink(missing_ok=True)
        return entry

    def _found(self, known: Entry | None) -> Entry | None:
        """Prove a file that has its name already, if that can be done."""
        file = self._file
        if not self._path.is_file() or self._path.stat().st_size != file.nbytes:
            return None
        if known is not None and known.nbytes == file.nbytes and known.digest == file.digest:
            return known
        if file.digest is None:
            return None
        return self._proven(self._hashed(self._path))

    def _fetch(self) -> Entry | None:
        """Complete the part; None: its bytes are wrong, and it is gone."""
        hasher = self._resumed()
        offset = hasher.nbytes
        with self._opened() as part:
            part.seek(offset)
            for data in self._bytes(offset):
                self._check()
                part.write(data)
                hasher.update(data)
                self._progress.received(len(data))
            self._check_alone(part)
        entry = self._proven(hasher)
        if entry is None:
            self._progress.found(-self._file.nbytes)
            self._part.forget()
            if not offset:
                raise ConfigError(self._wrong)
        return entry

    def _resumed(self) -> Hasher:
        """Return the hash of what is there of the part, which is nothing if it is of other bytes."""
        if not self._part.nbytes:
            self._part.begin()
        hasher = self._hashed(self._part.path)
        self._progress.found(hasher.nbytes)
        return hasher

    def _opened(self) -> BinaryIO:
        try:
            return self._part.path.open("r+b")
        except FileNotFoundError:
            raise self._not_alone() from None

    def _check_alone(self, part: BinaryIO) -> None:
        """Raises `Interrupted` if what was written is not what has the part's name, whole and no more."""
        self._check()
        part.flush()
        written = os.fstat(part.fileno())
        try:
            is_named = os.path.samestat(written, self._part.path.stat())
        except FileNotFoundError:
            is_named = False
        if not is_named or written.st_size != self._file.nbytes:
            raise self._not_alone()

    def _not_alone(self) -> Interrupted:
        return Interrupted(f"{self._part.path} was changed by another process: try again once nobody else writes there")

    def _hashed(self, path: Path) -> Hasher:
        hasher = Hasher(self._file)
        with path.open("rb") as file:
            for data in _chunks(file):
                self._check()
                hasher.update(data)
        return hasher

    def _bytes(self, offset: int) -> Iterator[bytes]:
        """Yield what is missing, over as many connections as it takes."""
        pause, failed = threading.Event(), 0
        while offset < self._file.nbytes:
            try:
                for data in self._origin.read(self._file, offset):
                    offset, failed = offset + len(data), 0
                    if offset > self._file.nbytes:
                        raise ConfigError(
                            f"{self._file.name} has more bytes than the {self._file.nbytes} it is to have"
                        )
                    yield data
                problem = "the connection ended early"
            except Interrupted as error:
                problem = str(error)
            if offset == self._file.nbytes:
                return
            failed += 1
            if failed == TRIES:
                raise Interrupted(f"{self._file.name}: {problem}; after {TRIES} tries at byte {offset}")
            logger.warning("%s: %s at byte %d: trying again", self._file.name, problem, offset)
            pause.wait(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failed - 1)))
            self._check()

    def _proven(self, hasher: Hasher) -> Entry | None:
        """Return the entry of a file with this hash, if it is the one that it should have."""
        digest, expected = hasher.digest(), self._file.digest
        return Entry(self._file.name, self._file.nbytes, digest) if expected in (None, digest) else None

    @property
    def _wrong(self) -> str:
        expected = self._file.digest or Digest("sha256", "?")
        told = f"{self._file.name} is not what it should be: {expected.algorithm} {expected.hexdigest} is expected"
        return f"{told}. The source, or what lists its checksums, is damaged; nothing of it was kept"


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(CHUNK):
        yield data
