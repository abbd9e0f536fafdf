"""Turns one bootstrap replica's watch stream into events of the membership. Pure: no sockets, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from diptych.common.members.instances import place_of
from diptych.common.members.membership import Snapshot, Update
from diptych.common.members.record import Record, State
from diptych.v1.bootstrap_pb2 import Instance, LoadNews, WatchUpdate

_STATES: Final = frozenset(map(int, State))


class Gap(Exception):
    """Something was lost: the next stream starts with a snapshot."""


class WatchStream:
    """Follows one stream, from its snapshot on."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self.patience_s: float | None = None  # a replica that is silent for so long is away; None: it may be silent
        self._revision: int | None = None
        self._records: dict[int, Record[Instance]] = {}  # each as last reported on this stream

    def receive(self, update: WatchUpdate) -> Snapshot[Instance] | Update[Instance]:
        """Return what an update says. Raises `Gap`."""
        follows = self._revision is not None and update.revision == self._revision + 1
        if not update.snapshot and not follows:
            raise Gap
        self._revision = update.revision
        known = (instance for instance in update.upserts if instance.state in _STATES)  # a later version has more
        upserts = {instance.instance_id: to_record(instance) for instance in known}
        if update.snapshot:
            self._records = upserts
            self._note_loads(update.loads)
            self.patience_s = update.lease_ms / 1000 if update.max_silence_ms else None
            return Snapshot(self._replica, tuple(self._records.values()), update.lease_ms / 1000 or None)
        self._records.update(upserts)
        for instance_id in update.removed:
            self._records.pop(instance_id, None)
        touched = upserts.keys() | self._note_loads(update.loads)
        records = tuple(self._records[each] for each in touched if each in self._records)
        return Update(self._replica, records, tuple(update.removed), tuple(update.ended))

    def _note_loads(self, loads: Iterable[LoadNews]) -> set[int]:
        """Take in what is newer than the record; return whose it is."""
        touched = set()
        for news in loads:
            record = self._records.get(news.instance_id)
            if record is not None and record.sequence < news.sequence:
                self._records[news.instance_id] = _with_load(record, news)
                touched.add(news.instance_id)
        return touched


def _with_load(record: Record[Instance], news: LoadNews) -> Record[Instance]:
    instance = Instance()
    instance.CopyFrom(record.payload)
    instance.load.CopyFrom(news.load)
    instance.sequence = news.sequence
    return dataclasses.replace(record, payload=instance, sequence=news.sequence)


def to_record(instance: Instance) -> Record[Instance]:
    """Return what membership decides by. Raises `ValueError` for a state that this version does not know."""
    return Record(
        instance.instance_id,
        place_of(instance),
        State(instance.state),
        payload=instance,
        started_ns=instance.started_unix_ns,
        sequence=instance.sequence,
    )
