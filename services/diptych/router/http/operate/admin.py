"""What operators see of a router, as one process of it knows: its workers, and why a request went where it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.draining import Drainable, drain_route
from diptych.common.errors import InvalidRequest, NotFound
from diptych.common.members.roles import WorkerRole
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, OperatorError, operator_route
from diptych.common.trust.trust import Trust
from diptych.router.choose.explain import Explanation
from diptych.router.http.exchange.timings import hex_id
from diptych.router.workers.drain import DRAIN_PATH
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.reconciler import Reconciler
from diptych.router.workers.session import Session
from diptych.router.workers.worker_view import WorkerLoad

WORKERS_PATH: Final = "/admin/workers"
DECLARED_PATH: Final = "/admin/declared"
MAX_DECLARED_BYTES: Final = 64 << 10  # it is a part of each heartbeat
EXPLAIN_PATH: Final = "/admin/explain/{request_id:path}"

Explain = Callable[[str], Explanation | None]  # a request, by its id


class Load(TypedDict):
    """What a worker has to do."""

    link_bytes_per_s: dict[str, float]  # by peer
    num_requests: int
    queued_tokens: int
    free_tokens: int
    has_credit: bool
    queued_transfer_bytes: int


class Worker(Load):
    """A worker, as the router knows it."""

    instance: str
    role: WorkerRole
    address: str
    model: str
    pool: str
    pod: str
    version: str
    state: str
    not_ready: str
    is_connected: bool
    silent_s: int  # since its scheduler was heard; 0: it is
    is_paused: bool
    context_len: int
    adapters: list[str]
    linked: list[str]
    open_legs: int
    cached_pages: int
    only_here_pages: int | None  # about how many of them no other worker has; null: not known
    is_cache_known: bool


class Declared(TypedDict):
    """What is declared, and what is not so yet."""

    adapters: dict[str, str]
    pools: dict[str, float]
    log_level: str
    problems: dict[str, str]
    changes: list[str]  # that this call has made


class WorkerList(TypedDict):
    """The answer of /admin/workers."""

    router: str
    problem: str | None
    workers: list[Worker]


def admin_app(
    fleet: Fleet,
    explain: Explain,
    drain: Drainable,
    reconciler: Reconciler,
    trust: Trust,
    refusals: Refusals,
    others: Sequence[Route] = (),
) -> Starlette:
    """Return the application of operators: all paths want the token, and all that they say is JSON.

    `others` are paths of theirs that stand elsewhere.
    """

    async def workers(request: Request) -> Answer:
        only_here = fleet.prefixes.told.only_here()
        listed = [_worker(session, fleet, only_here.get(session.instance_id)) for session in fleet.sessions()]
        return 200, WorkerList(router=hex_id(fleet.router_id), problem=fleet.problem(), workers=listed)

    async def story(request: Request) -> Answer:
        request_id = request.path_params["request_id"]
        found = explain(request_id)
        if found is None:
            raise NotFound(f"nothing is known of {request_id!r}: it is too long ago, or another process served it")
        return 200, found

    async def declared(request: Request) -> Answer:
        words = await _declare(reconciler, request) if request.method == "POST" else []
        return 200, _declared(reconciler, words)

    routes = [
        operator_route(DECLARED_PATH, ("GET", "POST"), declared, trust, refusals),
        drain_route(DRAIN_PATH, drain, trust, refusals),
        operator_route(WORKERS_PATH, ("GET",), workers, trust, refusals),
        operator_route(EXPLAIN_PATH, ("GET",), story, trust, refusals),
        *others,
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _framework_error})


async def _declare(reconciler: Reconciler, request: Request) -> list[str]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_DECLARED_BYTES:
            raise InvalidRequest(f"a declaration has at most {MAX_DECLARED_BYTES} bytes")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"a declaration is TOML, in UTF-8: {error}") from None
    return await reconciler.replace(text)


def _declared(reconciler: Reconciler, words: list[str]) -> Declared:
    now = reconciler.declared
    return {
        "adapters": dict(now.adapters),
        "pools": dict(now.pools),
        "log_level": now.log_level,
        "problems": dict(reconciler.problems),
        "changes": words,
    }


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body: OperatorError = {"error": f"{request.method} {request.url.path}: {error.detail}"}
    return Response(orjson.dumps(body), error.status_code, error.headers, "application/json")


def _worker(session: Session, fleet: Fleet, only_here_pages: int | None) -> Worker:
    view, record, index = session.view(), session.worker.record, fleet.prefixes.told
    return {
        "instance": hex_id(session.instance_id),
        "role": cast(WorkerRole, view.role.value),
        "address": record.address,
        "model": record.model_id,
        "pool": record.pool,
        "pod": record.pod,
        "version": record.version,
        "state": view.state.name.lower(),
        "not_ready": view.not_ready,
        "is_connected": session.is_open,
        "silent_s": session.worker.load.silent_s,
        "is_paused": view.paused,
        "context_len": record.context_len,
        "adapters": sorted(view.adapters),
        "linked": [hex_id(peer) for peer in sorted(view.linked)],
        "open_legs": session.num_open_legs,
        **_load(session.load()),
        "cached_pages": index.num_pages(session.instance_id),
        "only_here_pages": only_here_pages,
        "is_cache_known": index.is_in_sync(session.instance_id),
    }


def _load(load: WorkerLoad) -> Load:
    return {
        "link_bytes_per_s": {hex_id(peer): speed for peer, speed in load.link_speeds.items()},
        "num_requests": load.num_requests,
        "queued_tokens": load.queued_tokens,
        "free_tokens": load.free_tokens,
        "has_credit": load.has_credit,
        "queued_transfer_bytes": load.queued_transfer_bytes,
    }
