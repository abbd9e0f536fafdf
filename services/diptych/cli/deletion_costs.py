"""Keeps `pod-deletion-cost` of worker pods current: `diptych deletion-costs`, a process of its own in a cluster.

Level-triggered: every round asks bootstrap and the API for everything, and writes what differs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diptych.cli.deletion_cost import ANNOTATION, changes, deletion_costs
from diptych.cli.members import members
from diptych.common import lifecycle
from diptych.common.config import option
from diptych.common.errors import ConfigError, DiptychError, Unavailable
from diptych.common.logging import LogConfig, setup
from diptych.common.members.kubernetes_api import KubernetesApi, in_cluster
from diptych.common.trust.trust import TrustConfig
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)


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

    asyncio.run(lifecycle.run_until_signal(lambda stop: _look_again_and_again(look, config.interval_s, stop)))
    return 0


async def _look_again_and_again(look: Callable[[], None], interval_s: float, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            await asyncio.to_thread(look)
        except DiptychError as error:
            logger.warning("%s; trying again", error)
        await lifecycle.wait_or_timeout(stop, interval_s)


def update(api: KubernetesApi, selector: str, listed: Iterable[Instance]) -> None:
    """Write what differs, passing over pods that can't be written. Raises `Unavailable` if they can't be listed."""
    for name, cost in changes(api.list("api/v1", "pods", selector), deletion_costs(listed)).items():
        try:
            api.patch("api/v1", "pods", name, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})
            logger.info("%s costs %d", name, cost)
        except Unavailable as error:
            logger.warning("%s", error)
