"""A model into a folder: who does it, what is missing, several files at once, and the manifest at the end.

Rule: the manifest is written last, and files that it names are never written to again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.cli.downloads.file_download import FileDownload
from diptych.cli.downloads.lease import Lease, held
from diptych.cli.downloads.manifest import ROOM, Entry, Manifest, Wanted, read_manifest, write_manifest
from diptych.cli.downloads.parts import Part, forget_others
from diptych.cli.downloads.progress import Progress
from diptych.cli.downloads.remote_files import Interrupted, Origin, RemoteFile
from diptych.cli.downloads.selection import select
from diptych.common.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
LOOK_S: Final = 1.0
TELL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How it is gone about."""

    parallel: int = 4  # files at once
    lease_s: float = 30.0  # after as long a silence another process goes on
    progress_s: float = 10.0


def is_complete(folder: Path, wanted: Wanted) -> bool:
    """Whether all of it is there, by the manifest. Raises `ConfigError` if the folder is another model's."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.covers(wanted) and manifest.is_whole(folder)


def await_complete(folder: Path, wanted: Wanted, wait_s: float) -> None:
    """Wait until somebody else has brought it. Writes nothing. Raises `Unavailable` after `wait_s`."""
    began_s, told_s, pause = time.monotonic(), -TELL_S, threading.Event()
    while not is_complete(folder, wanted):
        now_s = time.monotonic() - began_s
        if now_s >= wait_s:
            raise Unavailable(f"{wanted.source} is not complete in {folder} after {wait_s:g} s: see who downloads it")
        if now_s >= told_s + TELL_S:
            told_s = now_s
            logger.info("waiting until %s is complete in %s", wanted.source, folder)
        pause.wait(min(LOOK_S, wait_s - now_s))


def download(origin: Origin, folder: Path, wanted: Wanted, pace: Pace) -> Progress | None:
    """Bring what is wanted into the folder; None: it was there. Raises `ConfigError`, or `Unavailable`: try again."""
    try:
        if is_complete(folder, wanted):
            return None
        (folder / ROOM).mkdir(parents=True, exist_ok=True)
        lock = folder / ROOM / "lock"
        with held(lock, pace.lease_s, lambda: is_complete(folder, wanted), _tell_waiting) as lease:
            if lease is None or is_complete(folder, wanted):
                return None
            return _download(origin, folder, wanted, pace, lease)
    except OSError as error:
        raise _of_disk(folder, error) from error


def _tell_waiting(holder: str) -> None:
    logger.info("%s downloads into this folder: waiting for it", holder)


def _download(origin: Origin, folder: Path, wanted: Wanted, pace: Pace, lease: Lease) -> Progress:
    listing = origin.listed()
    by_name = {file.name: file for file in listing.files}
    files = [by_name[name] for name in select([*by_name], wanted.part, wanted.include)]
    unproven = [file.name for file in files if file.digest is None]
    if unproven:
        logger.warning("no checksum is known of %d files: only their sizes are checked (docs: weights)", len(unproven))
    forget_others(folder, listing.files)
    _check_room(folder, files)
    progress = Progress(sum(file.nbytes for file in files))
    with progress.told(pace.progress_s):
        work = _Work(origin, folder, progress, lease)
        entries = work.run(files, pace.parallel)
    lease.check()
    manifest = Manifest(wanted, listing.revision, tuple(entries))
    if not manifest.is_whole(folder):
        raise Interrupted(f"files in {folder} were changed by another process while they came: try again")
    write_manifest(folder, manifest)
    return progress


class _Work:
    """Files at once; when one can't be had, the others stop."""

    def __init__(self, origin: Origin, folder: Path, progress: Progress, lease: Lease) -> None:
        self._origin, self._folder, self._progress, self._lease = origin, folder, progress, lease
        self._has_failed = threading.Event()
        manifest = read_manifest(folder)
        self._known = {entry.name: entry for entry in manifest.entries} if manifest else {}

    def run(self, files: Sequence[RemoteFile], parallel: int) -> list[Entry]:
        largest_first = sorted(files, key=lambda file: -file.nbytes)
        pool = ThreadPoolExecutor(parallel)
        futures = [pool.submit(self._fetch, file) for file in largest_first]
        try:
            wait(futures)
        except BaseException:  # a signal: threads stop at their next bytes, and the lock is given back before that
            self._has_failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error
        return [future.result() for future in futures]

    def _fetch(self, file: RemoteFile) -> Entry:
        try:
            self._check()
            work = FileDownload(self._origin, file, self._folder, self._progress, self._check)
            return work.run(self._known.get(file.name))
        except BaseException:
            self._has_failed.set()
            raise

    def _check(self) -> None:
        self._lease.check()
        if self._has_failed.is_set():
            raise _Stopped("another file could not be had")


class _Stopped(Interrupted):
    """Not the reason why."""


def _check_room(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Raises `OSError` (ENOSPC) before a byte is fetched, if they can't all be kept."""
    needed = sum(_num_missing(folder, file) for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB free")


def _num_missing(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes must still come. A file of another size stays until its successor is whole."""
    path = folder / file.name
    is_there = path.is_file() and path.stat().st_size == file.nbytes
    return 0 if is_there else file.nbytes - Part(folder, file).nbytes


def _of_disk(folder: Path, error: OSError) -> ConfigError:
    words = error.strerror or str(error)
    if error.errno in FULL:
        told = "" if words == os.strerror(errno.ENOSPC) else f": {words}"
        return ConfigError(f"no space left in {folder}{told}; make room, or name a larger volume")
    return ConfigError(f"{folder} can't be written: {words}. User {os.getuid()} must be allowed to, on this node, too")
