"""The usage log: a line for each output that has ended, exact to the token, for whoever bills requests.

A thread of its own writes. What it can't write it keeps and tries again: a disk that is full or hangs holds up no
request, and costs no token (`diptych.router.values.usage`). Only what waits when the process is killed is lost.

Lines are with the kernel as soon as they are written, and on the disk within `SYNC_S`. Who moves the file away gets a
new one at the same path. Several processes append to one file: each write is of whole lines.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.common.errors import ConfigError
from diptych.router.values.usage import UsageQueue, UsageRecord, left_after

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 100_000  # records
AT_ONCE: Final = 1000  # lines
SYNC_S: Final = 1.0
RETRY_S: Final = 1.0
CLOSE_S: Final = 5.0  # for what waits to be written when the router ends


class UsageLog(Collector):
    """Takes records in the event loop, and appends them to a file. Tells Prometheus how it does."""

    def __init__(self, path: Path, max_waiting: int = MAX_WAITING) -> None:
        """Raise `ConfigError` if the file can't be written."""
        self._path = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise ConfigError(f"--usage-log: {path} can't be written: {error.strerror}") from None
        self._queue = UsageQueue(max_waiting)
        self._news = threading.Condition()
        self._is_closing = False
        self._left: list[bytes] = []  # of what was taken, not written yet
        self._unsynced_since_s: float | None = None
        self._num_written = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    @property
    def now_s(self) -> float:
        """The time that records are to have."""
        return round(time.time(), 3)

    def add(self, usage: UsageRecord) -> None:
        with self._news:
            self._queue.put(usage)
            self._news.notify()

    def close(self) -> None:
        """Write what waits, if it can be done soon; say what was not written."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join(CLOSE_S)
        with self._news:
            lost = [*self._left, *(each.to_line() for each in self._queue.pop(len(self._queue)))]
        if lost:
            logger.error(
                "the usage log lacks %d lines, as %s takes none: the first is %r", len(lost), self._path, lost[0]
            )

    def collect(self) -> Iterator[Metric]:
        name = "diptych_router_usage_lines"
        yield CounterMetricFamily(name, "Lines of the usage log that were written", self._num_written)
        waiting = len(self._queue) + len(self._left)
        yield GaugeMetricFamily(f"{name}_waiting", "Lines of the usage log that wait to be written", waiting)
        words = "Outputs that share a line of the usage log, as too many waited"
        yield CounterMetricFamily("diptych_router_usage_merged", words, self._queue.num_merged)

    def _run(self) -> None:
        while not (self._is_closing and (self._is_failing or self._is_done)):
            self._wait()
            try:
                self._write()
                self._is_failing = False
            except OSError as error:
                self._fail(error)
        os.close(self._file)

    @property
    def _is_done(self) -> bool:
        return not (self._queue or self._left or self._unsynced_since_s)

    def _wait(self) -> None:
        """Wait for something to do. After a failure only time helps."""
        with self._news:
            if self._is_failing:
                self._news.wait_for(lambda: self._is_closing, RETRY_S)
            elif not self._left:
                self._news.wait_for(lambda: self._queue or self._is_closing, self._sync_in_s())

    def _sync_in_s(self) -> float | None:
        since_s = self._unsynced_since_s
        return None if since_s is None else max(0.0, since_s + SYNC_S - time.monotonic())

    def _write(self) -> None:
        """Write some lines, and have the disk take them when it is time. Raises `OSError`."""
        if not self._left:
            with self._news:
                self._left = [usage.to_line() for usage in self._queue.pop(AT_ONCE)]
        if self._left:
            self._reopen_if_moved()
            num_lines, begins_anew = len(self._left), self._left[0].startswith(b"\n")
            end = b"" if begins_anew else _end_of_fragment(self._file)
            self._left = left_after(self._left, os.write(self._file, b"".join([end, *self._left])) - len(end))
            self._num_written += num_lines - len(self._left)
            self._unsynced_since_s = self._unsynced_since_s or time.monotonic()
        if self._is_closing or self._sync_in_s() == 0.0:
            os.fdatasync(self._file)
            self._unsynced_since_s = None

    def _reopen_if_moved(self) -> None:
        ours = os.fstat(self._file)
        try:
            there = self._path.stat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        file = _open(self._path)
        os.fdatasync(self._file)
        os.close(self._file)
        self._file = file

    def _fail(self, error: OSError) -> None:
        if not self._is_failing:
            logger.error("can't write the usage log %s: %s; %d lines wait", self._path, error, len(self._queue))
        self._is_failing = True


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _end_of_fragment(file: int) -> bytes:
    """Return the end of a line of which a full disk took only a part, whosever it is; empty: there is none."""
    size = os.fstat(file).st_size  # 0 of a pipe, which nobody can look into
    return b"" if not size or os.pread(file, 1, size - 1) == b"\n" else b"\n"
