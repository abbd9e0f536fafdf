"""Those who take part in a `membership_world.World`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diptych.bootstrap.outbox import Outbox
from diptych.bootstrap.replica import Replica
from diptych.common.members.membership import MembershipView, Snapshot, Update
from diptych.common.members.watch_stream import WatchStream
from diptych.v1.bootstrap_pb2 import Heartbeat, Instance, WatchUpdate

LEASE_S: Final = 3.0


class Wrong(AssertionError):
    """A rule was broken."""


@dataclass(eq=False)
class Worker:
    record: Instance
    next_beat_s: float
    sequence: int = 0
    alive: bool = True

    def heartbeat(self) -> bytes:
        self.sequence += 1
        return Heartbeat(sequence=self.sequence, instance=self.record).SerializeToString()


@dataclass(eq=False)
class Stream:
    """A watch stream: in order, and lost as a whole."""

    replica: Replica
    outbox: Outbox
    decoder: WatchStream
    told: dict[int, int] = field(default_factory=dict)  # the newest sequence number of what the replica lists
    on_its_way: deque[tuple[float, WatchUpdate]] = field(default_factory=deque)

    def note(self, event: Snapshot[Instance] | Update[Instance]) -> None:
        if isinstance(event, Snapshot):
            self.told = {record.instance_id: record.sequence for record in event.records}
        else:
            self.told.update((record.instance_id, record.sequence) for record in event.upserts)
            self.told = {i: sequence for i, sequence in self.told.items() if i not in event.removed}


@dataclass(eq=False)
class Watcher:
    view: MembershipView[Instance] = field(default_factory=lambda: MembershipView(lease_s=LEASE_S))
    streams: dict[int, Stream] = field(default_factory=dict)  # by replica
    missing_since_s: dict[int, float] = field(default_factory=dict)
    newest_shown: dict[str, Worker] = field(default_factory=dict)
    shown_before: set[int] = field(default_factory=set)


def listed(replica: Replica) -> list[int]:
    """Ask it as a new watcher would."""
    outbox = replica.open(with_loads=False)
    everything = WatchUpdate.FromString(replica.pop(outbox))
    replica.close(outbox)
    return [instance.instance_id for instance in everything.upserts]


def as_said(instance: Instance) -> Instance:
    said = Instance()
    said.CopyFrom(instance)
    said.ClearField("sequence")
    return said


def started(worker: Worker) -> int:
    return worker.record.started_unix_ns


def names(instances: dict[int, Instance]) -> list[str]:
    return sorted(
        f"{i.address}/{i.instance_id % 10000} {i.state} {i.paused} {i.load.num_running}" for i in instances.values()
    )
