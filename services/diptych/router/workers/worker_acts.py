"""Does the same on every worker that is ready, in the name of an operator: flushes caches, traces steps.

Each call carries the operator's own header, so that a worker decides by itself whether the caller may do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import grpc

from diptych.common.errors import (
    Conflict,
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
from diptych.v1.admin_pb2 import FlushCacheRequest, StartProfileRequest, StopProfileRequest, StopProfileResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

CALL_TIMEOUT_S: Final = 30.0
TRACE_TIMEOUT_S: Final = 240.0  # a trace may take a minute, and as long as two to be written

_ERRORS: Final = {
    each.grpc_status: each for each in (Conflict, Forbidden, InternalError, InvalidRequest, NotFound, Overloaded)
}


class WorkerActs:
    """What can be asked of all workers. Each returns an answer for each instance, or raises the first refusal."""

    def __init__(self, fleet: Fleet, trust: Trust) -> None:
        self._fleet = fleet
        self._trust = trust

    async def flush(self, authorization: str | None) -> Mapping[str, int]:
        """Return how many pages each has forgotten."""

        async def flush(stub: Any, instance_id: int) -> int:
            answer = await stub.FlushCache(FlushCacheRequest(instance_id=instance_id), timeout=CALL_TIMEOUT_S)
            return int(answer.pages)

        return await self._on(self._workers(()), authorization, flush)

    async def start_profile(
        self, authorization: str | None, instances: Sequence[str], skip_steps: int, num_steps: int, max_s: float
    ) -> Mapping[str, str]:
        """Return where each will write its trace, on its own machine."""

        async def start(stub: Any, instance_id: int) -> str:
            request = StartProfileRequest(
                instance_id=instance_id, skip_steps=skip_steps, num_steps=num_steps, max_s=max_s
            )
            return str((await stub.StartProfile(request, timeout=CALL_TIMEOUT_S)).path)

        return await self._on(self._workers(instances), authorization, start)

    async def stop_profile(
        self, authorization: str | None, instances: Sequence[str], wait_s: float
    ) -> Mapping[str, StopProfileResponse]:
        """Return what each has written."""

        async def stop(stub: Any, instance_id: int) -> StopProfileResponse:
            request = StopProfileRequest(instance_id=instance_id, wait_s=wait_s)
            answer: StopProfileResponse = await stub.StopProfile(request, timeout=TRACE_TIMEOUT_S)
            return answer

        return await self._on(self._workers(instances), authorization, stop)

    def _workers(self, instances: Sequence[str]) -> list[KnownWorker]:
        """Return those that are named, or all that are ready."""
        known = {f"{session.instance_id:016x}": session.worker for session in self._fleet.sessions()}
        for name in instances:
            if name not in known:
                raise NotFound(f"no worker is called {name!r}; there are: {', '.join(known) or 'none'}")
        chosen = [known[name] for name in instances] or [each for each in known.values() if each.state is State.READY]
        if not chosen:
            raise Unavailable("no worker is ready")
        return chosen

    async def _on(
        self, workers: Sequence[KnownWorker], authorization: str | None, call: Callable[[Any, int], Awaitable[Any]]
    ) -> dict[str, Any]:
        trust = self._trust.on_behalf_of(authorization)

        async def attempt(worker: KnownWorker) -> Any:
            async with open_channel(worker.record.address, trust) as channel:
                try:
                    return await call(WorkerAdminStub(channel), worker.record.instance_id)
                except grpc.aio.AioRpcError as error:
                    kind = _ERRORS.get(error.code().name, Unavailable)
                    return kind(f"{worker}: {error.details() or error.code().name}")

        answers = await asyncio.gather(*map(attempt, workers))
        if failure := next((answer for answer in answers if isinstance(answer, DiptychError)), None):
            raise failure  # all others have done it: every act may be repeated
        return {f"{worker.record.instance_id:016x}": answer for worker, answer in zip(workers, answers, strict=True)}
