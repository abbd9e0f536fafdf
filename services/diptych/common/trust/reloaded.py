"""Reads a value from files, again as soon as one of them has changed.

The last value stays when the files can't be read or are no longer valid, as in the middle of a replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloaded(Generic[T]):
    """What `read` makes of `paths`. Raises its `ConfigError` at first, and never again. Any thread may ask."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._seen = self._signature()
        self._value = read()

    def current(self) -> T:
        """Return what the files say now."""
        signature = self._signature()
        if signature != self._seen:
            self._seen = signature
            self._reload()
        return self._value

    def _reload(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ConfigError as error:
            logger.error("%s changed, but what was read before stays in use: %s", names, error)
        else:
            logger.info("%s changed: read again", names)

    def _signature(self) -> tuple[object, ...]:
        """Return what differs once a file was written or replaced; links are followed, as Kubernetes replaces them."""
        return tuple(map(_signature_of, self._paths))


def _signature_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
