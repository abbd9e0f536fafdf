"""Holds what one watcher has not been told yet: at most one entry an instance, however slowly it reads. Pure.

A watcher that has missed more than `MAX_LEFT` departures gets a snapshot instead of them. An empty update tells it
that the replica is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from diptych.v1.bootstrap_pb2 import WatchUpdate

MAX_LEFT: Final = 4096
SILENCES_A_LEASE: Final = 3


class Outbox:
    """A snapshot is due first. `revision` counts what was taken."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._revision = 0
        self._snapshot_is_due = True
        self._told: dict[int, bytes] = {}  # records, as WatchUpdates
        self._loads: dict[int, bytes] = {}  # news of loads, as WatchUpdates; never older than a record in `_told`
        self._left: dict[int, bool] = {}  # True: ended

    @property
    def owes_snapshot(self) -> bool:
        """Whether everything is told next, so that no change need be put."""
        return self._snapshot_is_due

    @property
    def is_empty(self) -> bool:
        return not (self._snapshot_is_due or self._told or self._loads or self._left)

    def add(self, upserts: Mapping[int, bytes], removed: Iterable[int], ended: Iterable[int]) -> None:
        """Add a change; a later one of the same instance replaces an earlier one."""
        if self._snapshot_is_due:
            return
        for instance_id, chunk in upserts.items():
            self._told[instance_id] = chunk
            self._left.pop(instance_id, None)
        left = {**dict.fromkeys(removed, False), **dict.fromkeys(ended, True)}
        for instance_id in left:
            self._told.pop(instance_id, None)
            self._loads.pop(instance_id, None)
        self._left.update(left)
        if len(self._left) > MAX_LEFT:
            self._clear()
            self._snapshot_is_due = True

    def add_loads(self, loads: Mapping[int, bytes]) -> None:
        if not self._snapshot_is_due:
            self._loads.update(loads)

    def pop(self, everything: Callable[[], Iterable[bytes]]) -> bytes:
        """Return what is due, as a WatchUpdate, and forget it; for a snapshot that is `everything()`."""
        self._revision += 1
        update = WatchUpdate(revision=self._revision, snapshot=self._snapshot_is_due)
        if self._snapshot_is_due:
            update.lease_ms = self._lease_ms
            update.max_silence_ms = self._lease_ms // SILENCES_A_LEASE
            chunks = [*everything()]
        else:
            update.removed.extend(self._left)
            update.ended.extend(instance_id for instance_id, ended in self._left.items() if ended)
            chunks = [*self._told.values(), *self._loads.values()]
        self._snapshot_is_due = False
        self._clear()
        return b"".join((update.SerializeToString(), *chunks))

    def _clear(self) -> None:
        self._told.clear()
        self._loads.clear()
        self._left.clear()
