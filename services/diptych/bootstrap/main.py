"""The membership service: `diptych bootstrap`.

A replica is live while its event loop comes round, and ready as soon as it serves. It does not wait to be complete:
workers register again within a heartbeat, and meanwhile its watchers retain what it had listed before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych.bootstrap.announcement import Announcement, instance_of
from diptych.bootstrap.caller import MAX_MESSAGE_BYTES, Limits
from diptych.bootstrap.replica import ReplicaSnapshot
from diptych.bootstrap.server import BootstrapService
from diptych.bootstrap.standing import Standing
from diptych.common import event_loop, lifecycle
from diptych.common.build_info import register_certificate_expiry, register_version
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.event_loop import LoopHeartbeat
from diptych.common.health.grpc_health import add_health
from diptych.common.health.health import HealthServer, Page
from diptych.common.logging import LogConfig, setup
from diptych.common.members.instances import role_of
from diptych.common.members.membership import Record
from diptych.common.net import descriptors
from diptych.common.net.reachable import bracketed
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.tls import Tls
from diptych.common.trust.trust import Trust, TrustConfig, forget_token
from diptych.common.verdicts.probes import Probes, Verdict, judge_loops

logger = logging.getLogger(__name__)

SNAPSHOT_S: Final = 5.0  # that the event loop gets to answer a scrape
STALL_S: Final = 30.0  # nothing on the loop takes a fraction of that
PREFIX: Final = "diptych_bootstrap"  # of metrics


@dataclass(frozen=True, slots=True)
class BootstrapConfig(LogConfig, TrustConfig):
    """Know who is alive, and tell everybody."""

    host: str = option("127.0.0.1", help="address to listen on; `::`: every one, of IPv4 too")
    port: int = option(7000, help="gRPC port; 0: any free one")
    health_port: int = option(0, help="HTTP port of /health/live|ready|startup and /metrics; 0: any free one")
    heartbeat_s: float = option(1.0, help="how often instances report, in seconds")
    lease_s: float = option(3.0, help="an instance that is silent for so many seconds is no longer listed")
    max_instances: int = option(8_000, help="how many may be listed; more are refused")
    max_watchers: int = option(8_000, help="how many may follow; every worker and router does")

    def validate(self) -> None:
        if not 0 < self.heartbeat_s <= self.lease_s / 2:
            raise ConfigError("--lease-s must be at least twice --heartbeat-s: one lost heartbeat must not evict")
        if min(self.max_instances, self.max_watchers) < 1:
            raise ConfigError("--max-instances and --max-watchers must be at least 1")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_instances, self.max_watchers)


def main(config: BootstrapConfig) -> int:
    """Serve until SIGTERM; return the exit code."""
    lifecycle.die_with_supervisor()
    setup("bootstrap", config.log_format, config.log_level)
    descriptors.use_all_descriptors()
    trust = config.trust()
    forget_token()
    asyncio.run(event_loop.run_until_signal(lambda stop: _serve(config, trust, stop)))
    return 0


async def _serve(config: BootstrapConfig, trust: Trust, stop: asyncio.Event) -> None:
    service = BootstrapService(trust, lease_s=config.lease_s, heartbeat_s=config.heartbeat_s, limits=config.limits)
    health = BootstrapHealth()
    refusals = Refusals()
    server = new_server(trust, refusals, [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    service.add_to(server)
    add_health(server, health.probes, ("diptych.v1.Bootstrap",))
    port = listen(server, config.host, config.port, trust)
    await server.start()
    logger.info("bootstrap at %s:%d", bracketed(config.host), port)
    loop = asyncio.get_running_loop()
    metrics = BootstrapMetrics(
        lambda: asyncio.run_coroutine_threadsafe(service.snapshot(), loop).result(SNAPSHOT_S), refusals, trust.tls
    )
    with HealthServer(config.host, config.health_port, health.probes, {"/metrics": metrics.page}):
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(service.run()), tasks.create_task(health.heartbeat.run())]
            await stop.wait()
            await server.stop(grace=None)
            for task in background:
                task.cancel()


class BootstrapHealth:
    """The probes. `heartbeat` must be running. Made when the replica serves; `_ready` says how long it has been up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self.heartbeat = LoopHeartbeat(clock)
        self.probes = Probes(self._live, self._ready, lambda: Verdict(True, "started"))

    def _live(self) -> Verdict:
        return judge_loops({"the event loop": self._clock() - self.heartbeat.last_s}, STALL_S)

    def _ready(self) -> Verdict:
        return Verdict(True, f"serves, for {self._clock() - self._started_s:.0f} s")


class BootstrapMetrics(Collector):
    """Asks for a snapshot at each scrape."""

    def __init__(self, snapshot: Callable[[], ReplicaSnapshot], refusals: Refusals, tls: Tls | None = None) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(refusals)
        register_version(self._registry)
        register_certificate_expiry(self._registry, tls)
        self._registry.register(self)

    def page(self) -> Page:
        return Page(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry))

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for a snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        counts, moves = snapshot.counts, snapshot.counts.moves
        members = GaugeMetricFamily(f"{PREFIX}_members", "Instances that are listed", labels=["role", "state"])
        for (role, state), count in sorted(Counter(map(_role_and_state, snapshot.listed)).items()):
            members.add_metric([role, state], count)
        yield members
        yield GaugeMetricFamily(f"{PREFIX}_watchers", "Who follows the membership", snapshot.num_watchers)
        yield _counter("heartbeats", "Heartbeats taken", counts.heartbeats)
        yield _counter("refused_heartbeats", "Heartbeats that could not be, or had no place", counts.refused)
        yield _counter("expirations", "Instances whose lease ran out", moves[Standing.EXPIRED])
        yield _counter("evictions", "Instances whose address a newer one took", moves[Standing.EVICTED])
        yield _counter("goodbyes", "Instances that left", moves[Standing.GONE])
        yield _counter("mismatches", "Kinds of workers that turned out never to pair with others", counts.mismatches)


def _role_and_state(record: Record[Announcement]) -> tuple[str, str]:
    return role_of(instance_of(record)), record.state.name.lower()


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", words, value)
