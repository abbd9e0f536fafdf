"""Keeps `pod-deletion-cost` of worker pods current: `diptych deletion-costs`, a process of its own in a cluster.

Level-triggered: every round asks bootstrap and the API for everything, and writes what differs.

Kubernetes ends the cheapest pods first when it scales down: the emptier a worker, the cheaper. Costs are coarse, a step
for twice as many requests, so that they seldom change: each change is a write to the API. A worker that drains already
is the cheapest: an operator who drains one before scaling down thereby chooses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.cli.requests.asking import members
from diptych.common import event_loop
from diptych.common.config import option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.logging import LogConfig, setup
from diptych.common.members.kubernetes_api import KubernetesApi, in_cluster
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.trust.trust import TrustConfig
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
LEAVING: Final = -1


@dataclass(frozen=True, slots=True)
class DeletionCostsConfig(LogConfig, TrustConfig):
    """Have Kubernetes end the emptiest workers first when it scales down.

    Runs in a pod whose service account may list and patch pods; workers must know their pod (DIPTYCH_POD_NAME).
    """

    bootstrap: tuple[str, ...] = option(
        ("127.0.0.1:7000",), help="bootstrap replicas; dns:///NAME:PORT: all behind a name"
    )
    selector: str = option("", help="labels of the pods to look at; none: all of the namespace")
    interval_s: float = option(15.0, help="how often to look, in seconds")

    def validate(self) -> None:
        if self.interval_s <= 0:
            raise ConfigError(f"--interval-s must be positive, not {self.interval_s}")


def main(config: DeletionCostsConfig) -> int:
    """Run until SIGTERM; return the exit code."""
    setup("deletion-costs", config.log_format, config.log_level)
    trust, api = config.trust(), in_cluster()
    logger.info("keeping deletion costs of pods in %s, every %g s", api.namespace, config.interval_s)

    def look() -> None:
        update(api, config.selector, members(config.bootstrap, trust))

    asyncio.run(event_loop.run_until_signal(lambda stop: event_loop.repeat(look, config.interval_s, stop)))
    return 0


def update(api: KubernetesApi, selector: str, listed: Iterable[Instance]) -> None:
    """Write what differs, passing over pods that can't be written. Raises `Unavailable` if they can't be listed."""
    for name, cost in changes(api.list("api/v1", "pods", selector), deletion_costs(listed)).items():
        try:
            api.patch("api/v1", "pods", name, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})
            logger.info("%s costs %d", name, cost)
        except DiptychError as error:
            logger.warning("%s", error)


def deletion_costs(members: Iterable[Instance]) -> Mapping[str, int]:
    """Return the cost of each worker's pod, by name."""
    by_pod: dict[str, list[Instance]] = {}
    for member in members:
        if member.pod and member.role in WORKER_ROLES:
            by_pod.setdefault(member.pod, []).append(member)
    return {pod: _cost(instances) for pod, instances in by_pod.items()}


def changes(pods: Iterable[Mapping[str, Any]], costs: Mapping[str, int]) -> Mapping[str, int]:
    """Return what has to be written: the costs of pods, as the API lists them, that say something else."""
    found = {pod["metadata"]["name"]: (pod["metadata"].get("annotations") or {}).get(ANNOTATION) for pod in pods}
    return {name: cost for name, cost in costs.items() if name in found and found[name] != str(cost)}


def _cost(instances: Iterable[Instance]) -> int:
    """Return 0 for no request, 1 for one, 2 for two or three, 3 for up to seven, ..."""
    serving = [each for each in instances if State(each.state) in (State.STARTING, State.READY)]
    if not serving:
        return LEAVING
    return sum(each.load.num_running + each.load.num_waiting for each in serving).bit_length()
