"""The lines of JSON that a pod prints, as they come."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from cluster import TIMEOUT_S

Line = dict[str, Any]


class Log:
    """What `kubectl logs --follow` prints, read by a thread of its own until `close`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._news = threading.Condition()
        self._lines: list[Line] = []
        self._has_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def so_far(self) -> list[Line]:
        with self._news:
            return list(self._lines)

    def wait_for(self, is_enough: Callable[[list[Line]], bool]) -> list[Line]:
        """Return all lines, as soon as they are enough. Raises `AssertionError` if they never will be."""
        with self._news:
            self._news.wait_for(lambda: self._has_ended or is_enough(self._lines), TIMEOUT_S)
            assert is_enough(self._lines), f"ended: {self._has_ended}; last lines: {self._lines[-3:]}"
            return list(self._lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                if line.startswith("{"):
                    self._append(json.loads(line))
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _append(self, line: Line) -> None:
        with self._news:
            self._lines.append(line)
            self._news.notify_all()
