"""Instances, bootstrap replicas and watchers in one thread with a clock of their own: the real cores, a bad network.

Heartbeats are lost, doubled and late, each for itself; watch streams break and lose what is on its way; replicas
restart and know nothing; instances change, end with and without a goodbye, and start again at an address that was used
before. After every step the world checks what must always be true.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

from membership_actors import LEASE_S, Stream, Watcher, Worker, Wrong, as_said, listed, names, started

from diptych.bootstrap.caller import Limits
from diptych.bootstrap.replica import Replica
from diptych.common.errors import InvalidRequest
from diptych.common.members.membership import Lost
from diptych.common.members.watch_stream import WatchStream
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, Instance, WatchUpdate

HEARTBEAT_S: Final = 1.0
STEP_S: Final = 0.1
MAX_DELAY_S: Final = 0.8 * LEASE_S  # of a message whose sender may be dead

_NEXT: Final = {
    bootstrap_pb2.INSTANCE_STATE_STARTING: bootstrap_pb2.INSTANCE_STATE_READY,
    bootstrap_pb2.INSTANCE_STATE_READY: bootstrap_pb2.INSTANCE_STATE_DRAINING,
    bootstrap_pb2.INSTANCE_STATE_DRAINING: bootstrap_pb2.INSTANCE_STATE_DRAINING,
}


class World:
    """`play` disturbs, `calm_down` stops that; `converge` checks that everybody then sees the truth in time."""

    def __init__(self, seed: int, num_replicas: int = 2, num_watchers: int = 3, num_addresses: int = 4) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.is_calm = False
        self.replicas: list[Replica | None] = [self._new_replica() for _ in range(num_replicas)]
        self.watchers = [Watcher() for _ in range(num_watchers)]
        self.addresses = [f"host-{number}:1" for number in range(num_addresses)]
        self.workers: dict[str, Worker] = {}  # alive, by address
        self.everybody: dict[int, Worker] = {}
        self._cut: set[tuple[int, int]] = set()  # (instance id, replica): no heartbeat passes
        self._mail: list[tuple[float, Callable[[], None]]] = []

    def play(self, duration_s: float, disturb: Callable[[World], None]) -> None:
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            disturb(self)
            self.step()

    def calm_down(self) -> None:
        """From now on everything arrives at once; what is late still comes, as a last disturbance."""
        self.is_calm = True
        self._cut.clear()
        self.replicas = [replica or self._new_replica() for replica in self.replicas]
        while self._mail or not all(self._has_caught_up(watcher) for watcher in self.watchers):
            self.step()

    def converge(self) -> None:
        until_s = self.now_s + LEASE_S + STEP_S
        while self.now_s < until_s:
            self.step()
        truth = {worker.record.instance_id: worker.record for worker in self.workers.values()}
        for number, watcher in enumerate(self.watchers):
            seen = {instance_id: as_said(instance) for instance_id, instance in watcher.view.instances.items()}
            if seen != truth:
                raise Wrong(f"watcher {number} sees {names(seen)}, and the truth is {names(truth)}")

    # what may be done to it

    def start(self, address: str) -> None:
        self.kill(address)
        record = Instance(
            instance_id=self.rng.getrandbits(64) or 1,
            role=ROLE_DECODE,
            address=address,
            state=bootstrap_pb2.INSTANCE_STATE_STARTING,
            started_unix_ns=round(self.now_s * 1e9) + len(self.everybody),
        )
        self.workers[address] = self.everybody[record.instance_id] = Worker(record, self.now_s)

    def kill(self, address: str) -> None:
        if address in self.workers:
            self.workers.pop(address).alive = False

    def deregister(self, address: str) -> None:
        if address in self.workers:
            worker = self.workers[address]
            worker.record.state = bootstrap_pb2.INSTANCE_STATE_GONE
            self._beat(worker)
            self.kill(address)

    def change(self, address: str) -> None:
        """Move on, be paused or not, be busier: tell it at once, or with the next heartbeat."""
        if address in self.workers:
            worker = self.workers[address]
            worker.record.load.num_running += 1
            if self.rng.random() < 0.5:
                worker.record.state = _NEXT[worker.record.state]
                worker.record.paused = not worker.record.paused
                self._beat(worker)

    def restart_replica(self, number: int) -> None:
        for watcher in self.watchers:
            self.break_stream(watcher, number)
        self.replicas[number] = None if self.rng.random() < 0.5 else self._new_replica()

    def break_stream(self, watcher: Watcher, number: int) -> None:
        stream = watcher.streams.pop(number, None)
        if stream:
            stream.replica.close(stream.outbox)
            watcher.view.apply(Lost(number), self.now_s)

    def cut(self, address: str, number: int) -> None:
        """Or mend it."""
        if address in self.workers:
            self._cut ^= {(self.workers[address].record.instance_id, number)}

    # its course

    def step(self) -> None:
        self.now_s += STEP_S
        for worker in self.workers.values():
            if worker.next_beat_s <= self.now_s:
                worker.next_beat_s = self.now_s + HEARTBEAT_S
                self._beat(worker)
        self._deliver_mail()
        for number, replica in enumerate(self.replicas):
            if replica is not None:
                self._serve(number, replica)
        for watcher in self.watchers:
            self._receive(watcher)
            self._check(watcher)

    def _has_caught_up(self, watcher: Watcher) -> bool:
        streams = watcher.streams.values()
        return len(streams) == len(self.replicas) and not any(stream.on_its_way for stream in streams)

    def _new_replica(self) -> Replica:
        return Replica(lease_s=LEASE_S, limits=Limits())

    def _beat(self, worker: Worker) -> None:
        for number in range(len(self.replicas)):
            data = worker.heartbeat()
            copies = 1 if self.is_calm else self.rng.choice((0, 1, 1, 1, 1, 2))
            if (worker.record.instance_id, number) not in self._cut:
                for _ in range(copies):
                    delay_s = 0.0 if self.is_calm else self.rng.uniform(0, MAX_DELAY_S) * self.rng.random() ** 2
                    self._mail.append((self.now_s + delay_s, partial(self._on_heartbeat, worker, number, data)))

    def _deliver_mail(self) -> None:
        due = [letter for at_s, letter in self._mail if at_s <= self.now_s]
        self._mail = [(at_s, letter) for at_s, letter in self._mail if at_s > self.now_s]
        self.rng.shuffle(due)
        for letter in due:
            letter()

    def _on_heartbeat(self, worker: Worker, number: int, data: bytes) -> None:
        replica = self.replicas[number]
        try:
            if replica is not None and replica.receive(data, self.now_s).evicted and worker.alive:
                raise Wrong(f"replica {number} evicts {worker.record.address}, which nobody has replaced")
        except InvalidRequest as error:
            raise Wrong(f"replica {number} refuses a heartbeat") from error

    def _serve(self, number: int, replica: Replica) -> None:
        if replica.next_deadline_s is not None and replica.next_deadline_s <= self.now_s:
            replica.tick(self.now_s)
        replica.announce_loads()
        for watcher in self.watchers:
            if number not in watcher.streams and self.rng.random() < 0.3:
                watcher.streams[number] = Stream(replica, replica.open(with_loads=True), WatchStream(number))
            stream = watcher.streams.get(number)
            if stream and not stream.outbox.is_empty and (self.is_calm or self.rng.random() < 0.5):
                update = WatchUpdate.FromString(replica.pop(stream.outbox))
                delay_s = 0.0 if self.is_calm else self.rng.uniform(0, 0.5)
                stream.on_its_way.append((self.now_s + delay_s, update))

    def _receive(self, watcher: Watcher) -> None:
        for stream in watcher.streams.values():
            while stream.on_its_way and stream.on_its_way[0][0] <= self.now_s:
                event = stream.decoder.receive(stream.on_its_way.popleft()[1])
                watcher.view.apply(event, self.now_s)
                stream.note(event)
        deadline_s = watcher.view.next_deadline_s
        if deadline_s is not None and deadline_s <= self.now_s:
            watcher.view.expire(self.now_s)

    # what must always be true

    def _check(self, watcher: Watcher) -> None:
        shown = [self.everybody[instance_id] for instance_id in watcher.view.instances]
        by_address = {worker.record.address: worker for worker in shown}
        if len(by_address) < len(shown):
            raise Wrong("two instances are shown at one address")
        for address, worker in by_address.items():
            newest = watcher.newest_shown.setdefault(address, worker)
            if started(worker) < started(newest) and newest.alive:
                raise Wrong(f"{address} is shown as its former self")
            watcher.newest_shown[address] = max(newest, worker, key=started)
        if not watcher.streams and not watcher.view.instances.keys() >= watcher.shown_before:
            raise Wrong("somebody is no longer shown although no replica is connected")
        watcher.shown_before = set(watcher.view.instances)
        for instance_id, instance in watcher.view.instances.items():
            if any(stream.told.get(instance_id, 0) > instance.sequence for stream in watcher.streams.values()):
                raise Wrong("an older record is shown than a replica has told")
        self._check_missing(watcher)

    def _check_missing(self, watcher: Watcher) -> None:
        heard = {i for stream in watcher.streams.values() for i in listed(stream.replica)}
        missing = {i for i in heard if self.everybody[i].alive} - watcher.view.instances.keys()
        watcher.missing_since_s = {i: watcher.missing_since_s.get(i, self.now_s) for i in missing}
        for since_s in watcher.missing_since_s.values():
            if self.now_s - since_s > LEASE_S:
                raise Wrong("a living instance that a replica hears is missing for longer than a lease")


def disturb(world: World) -> None:
    """Do something bad, or let somebody live on."""
    rng = world.rng
    address, number = rng.choice(world.addresses), rng.randrange(len(world.replicas))
    watcher = rng.choice(world.watchers)
    actions: list[tuple[float, Callable[[], None]]] = [
        (0.04, lambda: world.start(address)),
        (0.01, lambda: world.kill(address)),
        (0.02, lambda: world.deregister(address)),
        (0.10, lambda: world.change(address)),
        (0.02, lambda: world.restart_replica(number)),
        (0.02, lambda: world.break_stream(watcher, number)),
        (0.02, lambda: world.cut(address, number)),
    ]
    for probability, action in actions:
        if rng.random() < probability:
            action()
    world.replicas = [r or (None if rng.random() < 0.9 else world._new_replica()) for r in world.replicas]
