"""Paths that tools of SGLang and vLLM call beside the API: what the server is, how busy, its cache, traces, aborts.

What tells of the inside, or acts on workers, is for operators, as `/admin/` is. `/get_model_info` is for every client,
and `/abort_request` too, for requests of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.errors import DiptychError, InvalidRequest, Unavailable
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route
from diptych.common.trust.trust import Trust
from diptych.common.version import own_version
from diptych.router.errors import PermissionDenied
from diptych.router.http.exchange.answers import json_response, refusal
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.exchange.timings import hex_id
from diptych.router.http.fields.strict_model import Body
from diptych.router.keys.caller import ANYBODY
from diptych.router.serve.aborts import Aborts
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.sessions import MAX_COUNT, MAX_SESSION_ID_LEN, MAX_WAIT_S, Wish, close_session, open_session
from diptych.router.values.kept_sessions import MAX_IDLE_S
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.session import Session
from diptych.router.workers.worker_acts import WorkerActs

B = TypeVar("B", bound=Body)

ABORT: Final = "/abort_request"
MAX_STEPS: Final = 1000
MAX_TRACE_S: Final = 60.0
Instances = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1024)]


class AbortBody(Body):
    """The body of /abort_request, in SGLang's words."""

    rid: Annotated[str, Field(max_length=128)] | None = None  # or the id of its answer's header x-request-id
    abort_all: bool | None = None  # of the caller; of an operator: all
    abort_message: str | None = None  # without effect


class OpenSessionBody(Body):
    """The body of /open_session, in SGLang's words."""

    capacity_of_str_len: Annotated[int, Field(ge=1, le=MAX_COUNT)]  # tokens of all turns, here
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID_LEN)] | None = None  # none: a new one
    timeout: Annotated[float, Field(gt=0, le=MAX_IDLE_S)] | None = None  # seconds that it may be unused
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] | None = None  # ours: in line for room; 0 or none: no line
    context_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = (
        None  # ours: the longest context that is expected
    )
    model: Annotated[str, Field(max_length=1024)] | None = None  # ours: where there are several, which one
    streaming: Literal[False] | None = None

    def wish(self) -> Wish:
        return Wish(
            self.capacity_of_str_len,
            self.session_id or "",
            self.timeout or 0.0,
            self.wait_s or 0.0,
            self.context_tokens or 0,
            self.model or "",
        )


class CloseSessionBody(Body):
    """The body of /close_session."""

    session_id: Annotated[str, Field(max_length=MAX_SESSION_ID_LEN)]


class Closed(TypedDict):
    """The answer of /close_session."""

    was_open: bool


class StartProfileBody(Body):
    """The body of /start_profile, in SGLang's words."""

    start_step: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # steps from now that are not traced
    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    max_s: Annotated[float, Field(gt=0, le=MAX_TRACE_S)] | None = None  # ours
    instances: Instances | None = None  # ours; none: every worker
    activities: list[Literal["CPU", "GPU"]] | None = None  # without effect: both, as far as there are
    output_dir: None = None  # each worker writes into its own folder
    profile_by_stage: Literal[False] | None = None
    record_shapes: Literal[False] | None = None
    with_stack: Literal[False] | None = None
    merge_profiles: Literal[False] | None = None
    profile_prefix: None = None


class StopProfileBody(Body):
    """The body of /stop_profile."""

    wait_s: Annotated[float, Field(ge=0, le=MAX_TRACE_S)] | None = None  # ours: for traces to end by themselves
    instances: Instances | None = None  # ours; none: every worker


class Aborted(TypedDict):
    """The answer of /abort_request."""

    num_aborted: int


class Flushed(TypedDict):
    """The answer of /flush_cache."""

    success: bool
    num_pages: dict[str, int]  # that were forgotten, by instance


class Begun(TypedDict):
    """The answer of /start_profile."""

    paths: dict[str, str]  # by instance, each on its worker's machine


class TraceFile(TypedDict):
    """A trace of a worker's steps."""

    path: str  # on its machine
    bytes: int
    num_steps: int
    duration_s: float


class Traced(TypedDict):
    """The answer of /stop_profile."""

    traces: dict[str, TraceFile]


class ModelInfo(TypedDict):
    """The answer of /get_model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    served_model_name: str
    max_model_len: int


class WorkerState(TypedDict):
    """One worker, as SGLang's tools look for it."""

    instance: str
    role: str
    state: str
    num_requests: int
    queued_tokens: int
    free_tokens: int


class ServerInfo(TypedDict, total=False):
    """The answer of /get_server_info."""

    version: str
    model_path: str
    served_model_name: str
    context_length: int
    disaggregation_mode: str
    internal_states: list[WorkerState]
    prefill: list[dict[str, list[WorkerState]]]
    decode: list[dict[str, list[WorkerState]]]


class WorkerLoadOf(TypedDict):
    """The load of one worker, in SGLang's words."""

    dp_rank: int
    instance: str
    role: str
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int  # that wait to be computed


def operators_routes(
    pipeline: Pipeline, fleet: Fleet, bodies: BodyReader, trust: Trust, refusals: Refusals
) -> list[Route]:
    """Return the paths that want an operator's token."""
    acts = WorkerActs(fleet, trust)

    async def server_info(request: Request) -> Answer:
        return 200, server_info_of(pipeline, fleet)

    async def load(request: Request) -> Answer:
        return 200, [_load(number, session) for number, session in enumerate(_in_order(fleet))]

    async def flush(request: Request) -> Answer:
        await _read(bodies, Body, request)
        return 200, Flushed(success=True, num_pages=dict(await acts.flush(_authorization(request))))

    async def start(request: Request) -> Answer:
        body = await _read(bodies, StartProfileBody, request)
        wanted = (body.start_step or 0, body.num_steps or 0, body.max_s or 0.0)
        paths = await acts.start_profile(_authorization(request), body.instances or (), *wanted)
        return 200, Begun(paths=dict(paths))

    async def stop(request: Request) -> Answer:
        body = await _read(bodies, StopProfileBody, request)
        found = await acts.stop_profile(_authorization(request), body.instances or (), body.wait_s or 0.0)
        traces: dict[str, TraceFile] = {
            name: {
                "path": each.path,
                "bytes": each.bytes,
                "num_steps": each.num_steps,
                "duration_s": each.duration_s,
            }
            for name, each in found.items()
        }
        return 200, Traced(traces=traces)

    named: list[tuple[str, str, Callable[[Request], Any]]] = [
        ("GET", "/get_server_info", server_info),
        ("GET", "/server_info", server_info),
        ("GET", "/get_load", load),
        ("POST", "/flush_cache", flush),
        ("POST", "/start_profile", start),
        ("POST", "/stop_profile", stop),
    ]
    return [operator_route(path, (method,), handler, trust, refusals) for method, path, handler in named]


def add_server_tools(app: FastAPI, models: Models, bodies: BodyReader, trust: Trust) -> None:
    """Add the paths of clients to the application."""
    for path in ("/get_model_info", "/model_info"):
        app.add_route(path, partial(_model_info, models), methods=["GET"])
    app.add_route(ABORT, partial(_abort, models.aborts, bodies, trust), methods=["POST"])


def add_sessions(app: FastAPI, models: Models, bodies: BodyReader) -> None:
    """Add the paths by which clients open and close sessions."""

    async def opened(request: Request) -> Response:
        try:
            body = await _read(bodies, OpenSessionBody, request)
            opening = open_session(models, caller_of(request).name, body.wish())
            name = await until_disconnect(request.receive, opening)
            if name is None:
                raise Unavailable("the client has left the line")
            return json_response(name, request)
        except DiptychError as error:
            return refusal(error, request)

    async def closed(request: Request) -> Response:
        try:
            body = await _read(bodies, CloseSessionBody, request)
            was_open = await close_session(models, caller_of(request).name, body.session_id)
            return json_response(Closed(was_open=was_open), request)
        except DiptychError as error:
            return refusal(error, request)

    app.add_route("/open_session", opened, methods=["POST"])
    app.add_route("/close_session", closed, methods=["POST"])


def server_info_of(pipeline: Pipeline, fleet: Fleet) -> ServerInfo:
    """Return what the server is. Tools of SGLang look into the first of `decode`, where there are separate roles."""
    states = [_state(session) for session in _in_order(fleet)]
    info: ServerInfo = {
        "version": own_version(),
        "model_path": pipeline.model_ids[0],
        "served_model_name": pipeline.names[0],
        "context_length": pipeline.context_len,
        "disaggregation_mode": "null",
        "internal_states": states,
    }
    by_role = {role: [{"internal_states": [each]} for each in states if each["role"] == role] for role in _ROLES}
    return {**info, **{role: found for role, found in by_role.items() if found}}  # type: ignore[typeddict-item]


_ROLES: Final = ("prefill", "decode")


def _in_order(fleet: Fleet) -> list[Session]:
    return sorted(fleet.sessions(), key=lambda session: session.instance_id)


def _state(session: Session) -> WorkerState:
    view, load = session.view(), session.load()
    return {
        "instance": hex_id(session.instance_id),
        "role": view.role.value,
        "state": view.state.name.lower(),
        "num_requests": load.num_requests,
        "queued_tokens": load.queued_tokens,
        "free_tokens": load.free_tokens,
    }


def _load(number: int, session: Session) -> WorkerLoadOf:
    load = session.load()
    return {
        "dp_rank": number,
        "instance": hex_id(session.instance_id),
        "role": session.view().role.value,
        "num_reqs": load.num_requests,
        "num_waiting_reqs": load.num_queued,
        "num_tokens": load.queued_tokens,
    }


async def _model_info(models: Models, request: Request) -> Response:
    """Where there are several models, `?model=` says which one is meant."""
    try:
        pipeline = models.named(request.query_params.get("model", ""))
    except DiptychError as error:
        return refusal(error, request)
    model_id = pipeline.model_ids[0]
    info: ModelInfo = {
        "model_path": model_id,
        "tokenizer_path": model_id,
        "is_generation": pipeline.model.pooling is None,
        "preferred_sampling_params": None,
        "served_model_name": pipeline.names[0],
        "max_model_len": pipeline.context_len,
    }
    return json_response(info, request)


async def _abort(aborts: Aborts, bodies: BodyReader, trust: Trust, request: Request) -> Response:
    """An unknown id is no error: its request may just have ended."""
    try:
        body = await _read(bodies, AbortBody, request)
        return json_response(Aborted(num_aborted=_aborted(aborts, body, _owner(trust, request))), request)
    except DiptychError as error:
        return refusal(error, request)


def _aborted(aborts: Aborts, body: AbortBody, owner: str | None) -> int:
    if body.abort_all:
        if owner == ANYBODY.name:
            raise PermissionDenied("without keys nobody knows whose requests these are: abort_all is for operators")
        return aborts.abort_all(owner)
    if not body.rid:
        raise InvalidRequest("give rid, the id of a request, or abort_all", param="rid")
    return aborts.abort(body.rid, owner)


def _owner(trust: Trust, request: Request) -> str | None:
    """Return whose requests a caller may abort; None: everybody's."""
    caller = caller_of(request)
    if caller is not ANYBODY:
        return None if caller.is_admin else caller.name
    return ANYBODY.name if trust.http_refused(_authorization(request), f"POST {ABORT}") else None


async def _read(bodies: BodyReader, fields: type[B], request: Request) -> B:
    """Read a body; none is the same as an empty object."""
    held = bodies.hold(caller_of(request).name)
    try:
        return await bodies.read(request, held, lambda body: read_fields(fields, body or b"{}"))
    finally:
        held.release()


def _authorization(request: Request) -> str | None:
    return request.headers.get("authorization")
