"""Asks bootstrap who is alive, and members for their state, or to drain: workers over gRPC, routers over HTTP."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import grpc

from diptych.common.errors import ConfigError
from diptych.common.members.membership import MembershipView
from diptych.common.members.replicas import replicas_of
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.members.watch_stream import WatchStream
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.v1.admin_pb2 import DrainRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.bootstrap_pb2 import Instance, WatchRequest, WatchUpdate
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub
from diptych.v1.worker_pb2 import Drain, StatusRequest, WorkerStatus
from diptych.v1.worker_pb2_grpc import WorkerStub

T = TypeVar("T")

ANSWER_S: Final = 5.0  # that a replica may take
MAX_AT_ONCE: Final = 16
NEEDS_TOKEN: Final = "a router's HTTP port knows no certificates: give its token (--auth-token-file)"

_PHASES: Final = {
    "draining": Drain.PHASE_DRAINING,
    "handing back": Drain.PHASE_DRAINING,
    "empty": Drain.PHASE_EMPTY,
    "gone": Drain.PHASE_EMPTY,
}


def members(replicas: Sequence[str], trust: Trust) -> list[Instance]:
    """Ask all replicas: one that has just restarted knows few. Raises `ConfigError` if none answers."""
    replicas = replicas_of(replicas)
    view: MembershipView[Instance] = MembershipView(lease_s=math.inf)
    problems = []
    with ThreadPoolExecutor(len(replicas)) as pool:
        for number, answer in enumerate(pool.map(lambda address: _ask_replica(address, trust), replicas)):
            if isinstance(answer, str):
                problems.append(answer)
            else:
                view.apply(WatchStream(number).receive(answer), now_s=0.0)
    if len(problems) == len(replicas):
        advice = "--bootstrap (or DIPTYCH_BOOTSTRAP) says where it is, `diptych up` starts a platform"
        raise ConfigError(f"can't ask bootstrap at {', nor at '.join(problems)}; {advice}")
    return list(view.instances.values())


def _ask_replica(address: str, trust: Trust) -> WatchUpdate | str:
    """Return everything that a replica lists, or why it doesn't tell."""
    with open_sync_channel(address, trust) as channel:
        try:
            updates = BootstrapStub(channel).Watch(WatchRequest(), timeout=ANSWER_S)
            snapshot: WatchUpdate | None = next(updates, None)
            updates.cancel()
        except grpc.RpcError as error:
            return f"{address}: {error.details()}"
        return snapshot or f"{address}: it ended before it told who is listed"


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


def send(url: str, trust: Trust, timeout_s: float, body: bytes) -> Any:
    """Post a body, and return the JSON that a router answers. Raises as `fetch` does."""
    request = urllib.request.Request(url, data=body, method="POST", headers=dict(trust.metadata()))
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
