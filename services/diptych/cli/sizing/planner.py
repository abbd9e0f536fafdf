"""Watches a platform and says what it needs, or sees to it: `diptych planner`, `diptych planner --act`.

Level-triggered: every round asks bootstrap, routers and Kubernetes for everything, plans from what is there, and acts
on what differs. Nothing is kept that a restart would lose but the time for which a load has been watched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from diptych.cli.planning.config import PlannerConfig
from diptych.cli.planning.hands import Hands
from diptych.cli.planning.sources import cluster_of, counted, only_here
from diptych.cli.planning.watcher import NOTHING, Seen, Watcher
from diptych.cli.platform.whereabouts import located
from diptych.cli.requests.asking import members
from diptych.cli.sizing.simulate import SimulateConfig, worker_of
from diptych.common import event_loop
from diptych.common.logging import setup
from diptych.common.members.kubernetes_api import in_cluster
from diptych.planner.pools.orders import Orders, orders
from diptych.planner.values import PLANNED_ROLES, Plan

__all__ = ["PlannerConfig", "main"]

logger = logging.getLogger(__name__)

_MODES: Final = {False: "in shadow: nothing is changed", True: "and seeing to it"}


class PlanMetrics:
    """The last plan, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        wanted = Gauge("diptych_planner_workers", "Workers that are wanted", ["role"], registry=self.registry)
        self._wanted = {each: wanted.labels(each.value) for each in PLANNED_ROLES}
        self._admitted = Gauge(
            "diptych_planner_admitted_requests_per_s", "Requests to let in; infinite: all", registry=self.registry
        )
        self._reasons = Counter("diptych_planner_reasons", "Rounds by reason", ["why"], registry=self.registry)
        self._orders = Counter(
            "diptych_planner_orders", "What was asked for, by kind", ["kind"], registry=self.registry
        )

    def show(self, plan: Plan) -> None:
        for role in PLANNED_ROLES:
            self._wanted[role].set(plan.sizes.of(role))
        self._admitted.set(plan.admission.requests_per_s)
        for why in plan.why:
            self._reasons.labels(why.value).inc()

    def ordered(self, asked: Orders) -> None:
        for kind, number in (("scale", asked.scales), ("drain", asked.drains), ("role", asked.roles)):
            self._orders.labels(kind).inc(len(number))


def main(config: PlannerConfig) -> int:
    """Run until SIGTERM; return the exit code."""
    config = located(config)
    setup("planner", config.log_format, config.log_level)
    trust, metrics = config.trust(), PlanMetrics()
    watcher = Watcher(config, worker_of(SimulateConfig(step_model=config.step_model)).step_model)
    api = in_cluster() if config.selector else None
    hands = Hands(config, api, trust) if config.act and api else None
    if config.metrics_port:
        start_http_server(config.metrics_port, registry=metrics.registry)
    logger.info("planning every %g s, %s", config.interval_s, _MODES[config.act])

    def look() -> None:
        listed = tuple(members(config.bootstrap, trust))
        flipping = hands.flipping if hands else {}
        routers, cached = counted(listed, config.goal), only_here(listed, trust)
        cluster = cluster_of(api, config.selector) if api else NOTHING  # last: writes are refused once it has changed
        scene = watcher.round(Seen(time.monotonic(), listed, routers, cached, cluster, flipping, time.time_ns()))
        metrics.show(scene.plan)
        if hands:
            asked = orders(scene)
            metrics.ordered(asked)
            hands.carry_out(asked, {each.instance_id: each for each in listed})

    asyncio.run(event_loop.run_until_signal(lambda stop: event_loop.repeat(look, config.interval_s, stop)))
    if hands:
        hands.close()
    return 0
