"""Carries plans out: scales Deployments by the Kubernetes API, has workers drain and change their roles.

Nothing is waited for but single answers, and a role that changes is waited for on a thread of its own: whether it has
come to something is what the next round sees.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from diptych.cli.operate.role import set_role
from diptych.cli.planning.config import PlannerConfig
from diptych.cli.requests.asking import ask_to_drain
from diptych.common.errors import Conflict, DiptychError, Unavailable
from diptych.common.members.instances import name_of
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.common.members.roles import Role
from diptych.common.trust.trust import Trust
from diptych.planner.pools.orders import Orders, Scale, SetRole
from diptych.planner.pools.patience import Patience
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0  # that a worker may take
MAX_FLIPS: Final = 8  # at a time


class Hands:
    """What may change a platform. Call `close` at the end."""

    def __init__(
        self, config: PlannerConfig, api: KubernetesApi, trust: Trust, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._drain_s = config.drain_s
        self._api = api
        self._trust = trust
        self._clock = clock
        self._patience = Patience()
        self._flips: dict[int, tuple[Role, Future[None]]] = {}
        self._threads = ThreadPoolExecutor(MAX_FLIPS)
        self._left: tuple[str, ...] = ()

    @property
    def flipping(self) -> Mapping[int, Role]:
        """Return the workers that change their role just now, and to which."""
        self._flips = {each: flip for each, flip in self._flips.items() if not flip[1].done()}
        return {each: role for each, (role, _) in self._flips.items()}

    def carry_out(self, orders: Orders, listed: Mapping[int, Instance]) -> None:
        """Do what is ordered; what fails is told, and left alone for a while. `listed`: workers by instance id."""
        for scale in orders.scales:
            self._try(scale.pool.name, partial(self._scale, scale))
        for worker_id in orders.drains:
            self._try(worker_id, partial(self._drain, listed[worker_id]))
        for flip in orders.roles:
            if flip.worker_id not in self._flips and self._patience.may_try(flip.worker_id, self._clock()):
                done = self._threads.submit(self._flip, flip, listed[flip.worker_id])
                self._flips[flip.worker_id] = flip.role, done
        if orders.left != self._left:
            self._left = orders.left
            logger.info("left as it is: %s", "; ".join(orders.left) or "nothing")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, name: Hashable, act: Callable[[], None]) -> None:
        if not self._patience.may_try(name, self._clock()):
            return
        try:
            act()
            self._patience.worked(name)
        except DiptychError as error:
            pause_s = self._patience.failed(name, self._clock())
            logger.warning("%s; tried again in %.0f s at the earliest", error, pause_s)

    def _scale(self, scale: Scale) -> None:
        """Refused if the Deployment has changed since it was read, as with each pod that gets ready: no failure.

        The next round sees what it is then.
        """
        change = {"metadata": {"resourceVersion": scale.pool.version}, "spec": {"replicas": scale.replicas}}
        try:
            self._api.patch("apis/apps/v1", "deployments", f"{scale.pool.name}/scale", change)
        except Conflict as error:
            logger.info("%s: planned anew in the next round", error)
            return
        logger.info("%s has %d replicas now, it had %d", scale.pool.name, scale.replicas, scale.pool.replicas)

    def _drain(self, worker: Instance) -> None:
        answer = ask_to_drain(worker, None, self._trust, ANSWER_S)
        if answer.problem:
            raise Unavailable(f"{name_of(worker)} does not drain: {answer.problem}")
        logger.info("%s drains", name_of(worker))

    def _flip(self, flip: SetRole, worker: Instance) -> None:
        def act() -> None:
            set_role(worker, flip.role, self._drain_s, self._trust)
            logger.info("%s serves %s now", name_of(worker), flip.role.value)

        self._try(flip.worker_id, act)
