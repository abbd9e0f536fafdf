"""Asks members for their state, or to drain: workers over gRPC, routers over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import grpc

from diptych.common.members.roles import WORKER_ROLES
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.v1.admin_pb2 import DrainRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import Drain, StatusRequest, WorkerStatus
from diptych.v1.worker_pb2_grpc import WorkerStub

T = TypeVar("T")

MAX_AT_ONCE: Final = 16

NEEDS_TOKEN: Final = "a router's HTTP port knows no certificates: give its token (--auth-token-file)"

_PHASES: Final = {
    "draining": Drain.PHASE_DRAINING,
    "handing back": Drain.PHASE_DRAINING,
    "empty": Drain.PHASE_EMPTY,
    "gone": Drain.PHASE_EMPTY,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's record, newest first hand, and what it adds to it."""

    member: Instance
    status: WorkerStatus | None = None  # present if it is a worker and answers
    drain: Drain | None = None  # while it drains
    problem: str = ""  # why it does not answer
    is_gone: bool = False  # known to be, as silence alone says little: another has its address, or nobody lists it


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """The token is for the member only."""


_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def ask_all(members: Iterable[Instance], ask: Callable[[Instance], T]) -> list[T]:
    """Ask many at once; return the answers in order."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return list(pool.map(ask, members))


def ask(member: Instance, trust: Trust, timeout_s: float) -> Answer:
    """Ask one how it is."""
    if member.role in WORKER_ROLES:
        return _ask_worker(member, trust, timeout_s)
    if _lacks_token(trust):
        return Answer(member)  # what bootstrap says is all that can be known
    return _ask_router(member, trust, timeout_s, "GET", {})


def ask_to_drain(member: Instance, within_s: float | None, trust: Trust, timeout_s: float) -> Answer:
    """Have one drain; `within_s` None: in the time that it is configured for."""
    if member.role not in WORKER_ROLES:
        if _lacks_token(trust):
            return Answer(member, problem=NEEDS_TOKEN)
        query = {"instance": f"{member.instance_id:016x}"}
        if within_s is not None:
            query["deadline_s"] = f"{within_s:g}"
        return _ask_router(member, trust, timeout_s, "POST", query)
    request = DrainRequest(instance_id=member.instance_id)
    if within_s is not None:
        request.deadline_ms = round(within_s * 1000)
    with open_sync_channel(member.address, trust) as channel:
        try:
            WorkerAdminStub(channel).Drain(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return _silent(member, error)
    return ask(member, trust, timeout_s)


def fetch(url: str, trust: Trust, timeout_s: float, method: str = "GET") -> Any:
    """Return the JSON that a router answers. Raises `OSError`, and with a bad status `HTTPError`, which is one."""
    request = urllib.request.Request(url, method=method, headers=dict(trust.metadata()))
    with _DIRECTLY.open(request, timeout=timeout_s) as answer:
        return json.load(answer)


def _ask_worker(worker: Instance, trust: Trust, timeout_s: float) -> Answer:
    with open_sync_channel(worker.address, trust) as channel:
        try:
            request = StatusRequest(instance_id=worker.instance_id)
            status: WorkerStatus = WorkerStub(channel).GetStatus(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return _silent(worker, error)
    return Answer(status.instance, status, status.drain if status.HasField("drain") else None)


def _silent(worker: Instance, error: grpc.RpcError) -> Answer:
    is_gone = error.code() == grpc.StatusCode.NOT_FOUND  # another has its port; UNAVAILABLE may be the network's fault
    return Answer(worker, problem=error.details() or error.code().name, is_gone=is_gone)


def _lacks_token(trust: Trust) -> bool:
    return trust.tls is not None and trust.tokens is None


def _ask_router(router: Instance, trust: Trust, timeout_s: float, method: str, query: Mapping[str, str]) -> Answer:
    url = f"http://{router.address}/admin/drain?{urllib.parse.urlencode(query)}"
    try:
        instances = fetch(url, trust, timeout_s, method)["instances"]
    except urllib.error.HTTPError as error:
        with error:
            return Answer(router, problem=f"HTTP status {error.code}", is_gone=error.code == HTTPStatus.NOT_FOUND)
    except OSError as error:
        return Answer(router, problem=str(getattr(error, "reason", error)))
    progress = instances.get(f"{router.instance_id:016x}")
    if progress is None:
        return Answer(router, problem="another router has its address", is_gone=True)
    return Answer(router, drain=_drain_of(progress))


def _drain_of(progress: Mapping[str, Any]) -> Drain | None:
    if progress["phase"] not in _PHASES:
        return None
    return Drain(
        phase=_PHASES[progress["phase"]],
        requests_left=progress["requests_left"],
        oldest_s=progress["oldest_s"],
        deadline_s=progress["deadline_s"] or 0.0,
    )
