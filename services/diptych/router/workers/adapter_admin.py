"""Loads and unloads adapters on all workers of a model, of both roles: all have it, or none keeps it.

A load that fails on one worker is taken back from those that had not loaded it before. Answers come when this router
has heard of the change from the membership, so the next request finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, TypeVar

import grpc

from diptych.common.errors import (
    DiptychError,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.common.members.record import State
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.known_worker import KnownWorker
from diptych.v1.admin_pb2 import LoadLoraRequest, LoadLoraResponse, UnloadLoraRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 120.0  # reading a large adapter from a slow disk
NEWS_TIMEOUT_S: Final = 5.0  # until the membership tells of the change

_ERRORS: Final = {each.grpc_status: each for each in (Forbidden, InvalidRequest, NotFound, Overloaded, InternalError)}


class AdapterAdmin:
    """Changes the adapters of a fleet, one at a time."""

    def __init__(self, fleet: Fleet, trust: Trust, reserved: Collection[str] = ()) -> None:
        """`reserved` are names that no adapter may have."""
        self._fleet = fleet
        self._trust = trust
        self._reserved = reserved
        self._turn = asyncio.Lock()

    def on_behalf_of(self, authorization: str | None) -> AdapterAdmin:
        """Return one that shows workers the `authorization` of a caller, and takes its turn with this one."""
        other = AdapterAdmin(self._fleet, self._trust.on_behalf_of(authorization), self._reserved)
        other._turn = self._turn
        return other

    async def load(self, name: str, path: str) -> int:
        """Load an adapter everywhere; return on how many workers. Raises the first worker's error."""
        if name in self._reserved:
            raise InvalidRequest(f"{name!r} is a name of the model (--served-model-name): give the adapter another")
        async with self._turn:
            workers = self._workers()
            results = await _on_all(workers, lambda worker: self._load(worker, name, path))
            failures = {worker: result for worker, result in results.items() if isinstance(result, DiptychError)}
            if failures:
                await self._roll_back(name, results)
                raise next(iter(failures.values()))
            await self._wait_until(lambda: all(name in worker.adapters for worker in self._known(workers)))
        return len(workers)

    async def unload(self, name: str) -> int:
        """Unload an adapter everywhere; return on how many workers. Raises `NotFound` if no worker has it."""
        async with self._turn:
            workers = self._workers()
            results = await _on_all(workers, lambda worker: self._unload(worker, name))
            failures = {worker: result for worker, result in results.items() if isinstance(result, DiptychError)}
            others = {worker: error for worker, error in failures.items() if not isinstance(error, NotFound)}
            if others or len(failures) == len(workers):
                raise next(iter((others or failures).values()))
            await self._wait_until(lambda: not any(name in worker.adapters for worker in self._known(workers)))
        return len(workers) - len(failures)

    def is_loaded(self, name: str) -> bool:
        """Whether any worker has an adapter of this name; requests may use it only once those of a pair have."""
        return any(name in worker.adapters for worker in self._all() if worker.started_as)

    def _workers(self) -> list[KnownWorker]:
        workers = [worker for worker in self._all() if worker.state is State.READY]
        if not workers:
            raise Unavailable("no worker is ready")
        return workers

    def _known(self, workers: list[KnownWorker]) -> list[KnownWorker]:
        """Those of `workers` that have not left."""
        return [worker for worker in self._all() if worker in workers]

    def _all(self) -> list[KnownWorker]:
        return list(self._fleet.own_workers())

    async def _roll_back(self, name: str, results: Mapping[KnownWorker, LoadLoraResponse | DiptychError]) -> None:
        """Unload where this load succeeded, or where nobody knows."""
        touched = [worker for worker, result in results.items() if _may_have_loaded(result)]
        for worker, result in (await _on_all(touched, lambda worker: self._unload(worker, name))).items():
            if isinstance(result, DiptychError) and not isinstance(result, NotFound):
                logger.warning("can't take adapter %s back from %s: %s", name, worker, result)

    async def _load(self, worker: KnownWorker, name: str, path: str) -> LoadLoraResponse:
        async with open_channel(worker.record.address, self._trust) as channel:
            request = LoadLoraRequest(instance_id=worker.record.instance_id, name=name, path=path)
            response: LoadLoraResponse = await WorkerAdminStub(channel).LoadLora(request, timeout=CALL_TIMEOUT_S)
            return response

    async def _unload(self, worker: KnownWorker, name: str) -> None:
        async with open_channel(worker.record.address, self._trust) as channel:
            request = UnloadLoraRequest(instance_id=worker.record.instance_id, name=name)
            await WorkerAdminStub(channel).UnloadLora(request, timeout=CALL_TIMEOUT_S)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(NEWS_TIMEOUT_S):
                while not condition():
                    await self._fleet.wait_for_change()
        except TimeoutError:
            logger.warning("the workers have changed their adapters, but bootstrap does not say so")


def _may_have_loaded(result: LoadLoraResponse | DiptychError) -> bool:
    if isinstance(result, LoadLoraResponse):
        return not result.was_loaded
    return isinstance(result, Unavailable)


async def _on_all(
    workers: list[KnownWorker], work: Callable[[KnownWorker], Coroutine[Any, Any, T]]
) -> dict[KnownWorker, T | DiptychError]:
    """Do something on all workers at once; return what came of it on each."""

    async def attempt(worker: KnownWorker) -> T | DiptychError:
        try:
            return await work(worker)
        except grpc.aio.AioRpcError as error:
            kind = _ERRORS.get(error.code().name, Unavailable)
            return kind(f"{worker}: {error.details()}")

    return dict(zip(workers, await asyncio.gather(*map(attempt, workers)), strict=True))
