"""Give all workers of a model other weights while they run: `diptych update-weights /models/llama-v2`.

They change pair by pair, so that the other pairs serve meanwhile; a unified worker serves alone if need be, so it
changes alone. When a worker refuses, those that have changed go back, so old and new are never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

import grpc

from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import members
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.instances import name_of
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import UpdateWeightsRequest, UpdateWeightsResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.bootstrap_pb2 import Instance

Answer: TypeAlias = UpdateWeightsResponse | grpc.RpcError


@dataclass(frozen=True, slots=True)
class UpdateWeightsConfig(MembersConfig):
    """Give all workers of a model other weights of the same shape, pair by pair, without a restart."""

    model: str = argument(REQUIRED, help="as for --model of the workers; a path on their machines")
    started_as: str = option("", help="model id that the workers were started with; none: the only one")
    drain_s: float = option(30.0, help="for what runs on a worker to finish; the rest is moved to other workers")
    in_place: bool = option(False, help="without room for two sets of weights: a worker serves nothing meanwhile")
    version: str = option("", help="what the weights are called in answers; none: by their content")
    timeout_s: float = option(1800.0, help="for a worker to load and switch")


class UpdateFailed(DiptychError):
    """Some worker refused; all serve what they served before, unless the message says otherwise."""


def main(config: UpdateWeightsConfig) -> int:
    config = located(config)
    trust = config.trust()
    update = _Update(config, trust)
    try:
        for together in rounds(workers_of(members(config.bootstrap, trust), config.started_as)):
            update.apply(together)
    except UpdateFailed:
        update.revert()
        raise
    return 0


@dataclass(slots=True)
class _Update:
    """What has been done so far."""

    config: UpdateWeightsConfig
    trust: Trust
    done: list[tuple[Instance, str]] = field(default_factory=list)  # worker, and the model it served before

    def apply(self, workers: Sequence[Instance]) -> None:
        """Update workers at the same time. Raises `UpdateFailed` when all have answered and one refused."""
        refusals = []
        for worker, answer in _together(lambda worker: self._call(worker, self.config.model), workers):
            if isinstance(answer, grpc.RpcError):
                refusals.append(f"{name_of(worker)}: {answer.details()}")
                continue
            print(f"{name_of(worker)}: {answer.model_id} in place of {answer.previous_model_id}", flush=True)
            self.done.append((worker, answer.previous_model))
        if refusals:
            raise UpdateFailed("; ".join(refusals))

    def revert(self) -> None:
        """Bring back what was served before."""
        for worker, model in reversed(self.done):
            answer = self._call(worker, model)
            words = f"still new: {answer.details()}" if isinstance(answer, grpc.RpcError) else "as before"
            print(f"{name_of(worker)}: {words}", flush=True)

    def _call(self, worker: Instance, model: str) -> Answer:
        request = UpdateWeightsRequest(
            instance_id=worker.instance_id,
            model=model,
            drain_ms=round(self.config.drain_s * 1000),
            in_place=self.config.in_place,
            version=self.config.version if model == self.config.model else "",
        )
        with open_sync_channel(worker.address, self.trust) as channel:
            try:
                response: UpdateWeightsResponse = WorkerAdminStub(channel).UpdateWeights(
                    request, timeout=self.config.timeout_s
                )
            except grpc.RpcError as error:
                return error
        return response


def _together(call: Callable[[Instance], Answer], workers: Sequence[Instance]) -> Iterable[tuple[Instance, Answer]]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(zip(workers, pool.map(call, workers), strict=True))


def workers_of(instances: Iterable[Instance], started_as: str) -> list[Instance]:
    """Return the ready workers that were started with a model; empty: with the only one there is."""
    ready = [i for i in instances if i.role in WORKER_ROLES and i.state == bootstrap_pb2.INSTANCE_STATE_READY]
    names = sorted({instance.started_as for instance in ready}) or ["none"]
    if not started_as and len(names) > 1:
        raise ConfigError(f"workers were started with {' and '.join(names)}: say which with --started-as")
    workers = [instance for instance in ready if instance.started_as == (started_as or names[0])]
    if not workers:
        raise ConfigError(f"no worker is ready that was started with {started_as!r}; there are: {', '.join(names)}")
    return workers


def rounds(workers: Sequence[Instance]) -> list[list[Instance]]:
    """Return who is updated together: a prefill and a decode worker, as long as there are both; then one by one."""
    prefills = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_PREFILL]
    decodes = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_DECODE]
    unified = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_UNIFIED]
    pairs = [[worker for worker in pair if worker is not None] for pair in zip_longest(prefills, decodes)]
    return [*pairs, *([worker] for worker in unified)]
