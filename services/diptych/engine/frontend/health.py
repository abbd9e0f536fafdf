"""The probes of a worker process: gathers the facts, whatever thread asks, and has `worker_probes` judge them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from diptych.common.health.probes import Probes, Verdict
from diptych.common.members.heartbeat import LoopHeartbeat
from diptych.common.members.membership_client import MembershipWatcher
from diptych.engine.frontend import probes as worker_probes
from diptych.engine.frontend.probes import InstanceFacts
from diptych.v1 import bootstrap_pb2


class WorkerHealth:
    """`heartbeat` must be running on the frontend's loop."""

    def __init__(
        self,
        instances: Callable[[], Sequence[InstanceFacts]],
        watcher: MembershipWatcher,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._watcher = watcher
        self._stall_s = stall_s
        self._clock = clock
        self._started_s = clock()
        self._num_known_routers = 0
        self.heartbeat = LoopHeartbeat(clock)
        self.probes = Probes(self._live, self._ready, self._startup)
        watcher.add_listener(self._count_routers)

    def _live(self) -> Verdict:
        return worker_probes.live(self._instances(), self.heartbeat.last_s, self._clock(), self._stall_s)

    def _ready(self) -> Verdict:
        return worker_probes.ready(self._instances(), self._num_known_routers)

    def _startup(self) -> Verdict:
        return worker_probes.startup(self._instances(), self._clock() - self._started_s)

    def _count_routers(self) -> None:
        """On the loop's thread, to which the membership belongs."""
        members = self._watcher.instances().values()
        self._num_known_routers = sum(
            member.role == bootstrap_pb2.ROLE_ROUTER and member.state == bootstrap_pb2.INSTANCE_STATE_READY
            for member in members
        )
