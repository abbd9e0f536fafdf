"""One at a time downloads into a folder, which many machines may share: a lock file that its holder keeps touching.

Locks of the kernel are no help on every shared file system. A holder that has not touched its lock for a lease is
taken for dead; the time of one machine is never compared with another's. Rule: this saves bytes, not files. Two that
write at once for a moment, because one of them stood still, write the same bytes to the same places, and prove them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from diptych.cli.downloads.remote_files import Interrupted

TOUCHES: Final = 4  # a lease
LOOK_S: Final = 1.0  # who waits looks as often, at least
NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Lease:
    """Held by this process, as far as it knows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder = f"{socket.gethostname()} {uuid.uuid4().hex}"
        self.is_lost = threading.Event()
        self._num_missed = 0  # touches in a row that found no lock

    def try_to_take(self) -> bool:
        """Make the lock file. It appears with its content, on NFS, too."""
        beside = self.path.with_name(f"{self.path.name}.{self.holder.split()[1]}")
        beside.write_text(self.holder)
        try:
            _place(beside, self.path)
        except FileExistsError:
            return False
        finally:
            beside.unlink()
        return True

    def touch(self) -> None:
        """Say that the holder lives, or find that somebody else has the lock, or nobody for two touches.

        For a moment it may not be there: a server restarts, or one who watches has it aside (`Silence.end`).
        """
        found = ""
        with contextlib.suppress(OSError), self.path.open("r+") as file:
            found = file.read()
            if found == self.holder:
                os.utime(file.fileno())
                self._num_missed = 0
                return
        self._num_missed += 1
        if found not in ("", self.holder) or self._num_missed == 2:
            self.is_lost.set()

    def check(self) -> None:
        """Raises `Interrupted` once somebody else has taken over."""
        if self.is_lost.is_set():
            raise Interrupted("this process stood still, and another one has gone on with the download")

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.read_text() == self.holder:
                self.path.unlink()


class Silence:
    """How long a lock has looked the same, to one who watches it."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._seen, self._since_s = _look(path), clock()

    def lasts_s(self) -> float:
        seen = _look(self._path)
        if seen != self._seen:
            self._seen, self._since_s = seen, self._clock()
        return self._clock() - self._since_s

    def end(self) -> None:
        """Take the lock away from who is taken for dead, unless it is another one by now, or was touched."""
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            self._path.rename(aside)
            if _look(aside) != self._seen:
                with contextlib.suppress(FileExistsError):
                    _place(aside, self._path)
            aside.unlink()


def _look(path: Path) -> tuple[str, int]:
    """Who holds a lock, and when it was touched. Opening asks the server, where it is another machine's file."""
    try:
        with path.open() as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return "", 0


def _place(written: Path, path: Path) -> None:
    """Let a file appear at `path`. Raises `FileExistsError` if one is there. `written` stays.

    By a link it appears with its content. Volumes without links (SMB, many FUSE) show it empty for a moment, which
    is nobody's lock that could be lost.
    """
    try:
        os.link(written, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with path.open("x") as file:
            file.write(written.read_text())


@contextlib.contextmanager
def held(
    path: Path, lease_s: float, is_done: Callable[[], bool], told: Callable[[str], None]
) -> Iterator[Lease | None]:
    """Wait for the lock, and hold it within the block; None: somebody else has done the work meanwhile."""
    lease, silence, is_told = Lease(path), Silence(path, time.monotonic), False
    pause = threading.Event()
    while not lease.try_to_take():
        if is_done():
            yield None
            return
        if not is_told:
            told(_look(path)[0].partition(" ")[0] or "another one")
            is_told = True
        if silence.lasts_s() > lease_s:
            silence.end()
        else:
            pause.wait(min(LOOK_S, lease_s / TOUCHES / 2))
    ends = threading.Event()
    toucher = threading.Thread(target=_touch, args=(lease, lease_s / TOUCHES, ends), daemon=True)
    toucher.start()
    try:
        yield lease
    finally:
        ends.set()
        toucher.join()
        lease.release()


def _touch(lease: Lease, every_s: float, ends: threading.Event) -> None:
    while not ends.wait(every_s):
        lease.touch()
