"""/v1/batches, as OpenAI's clients use them."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import FastAPI
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.errors import InvalidRequest, NotFound
from diptych.router.batches.batches import Batches
from diptych.router.batches.files import is_id, new_id
from diptych.router.batches.job import Ending, Job, Problem, Spec
from diptych.router.batches.store import Unreadable
from diptych.router.http.exchange.answers import json_response
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.openai.batch_paths import PATHS
from diptych.router.http.openai.files import (
    BATCHES_LISTED,
    INPUT,
    MAX_BATCHES_LISTED,
    FileRoutes,
    Window,
    answering,
    listed,
)

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S: Final = 14 * 86400
MAX_METADATA: Final = 16
MAX_KEY_LEN: Final = 64
MAX_VALUE_LEN: Final = 512
IDEMPOTENCY_KEY: Final = "idempotency-key"  # header by which a client that asks again gets the same batch
MAX_IDEMPOTENCY_LEN: Final = 256


class BatchError(TypedDict):
    """Something that is wrong with the input."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    """All of it, as far as it is told."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """How far a batch is."""

    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """Some batches, the newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


WINDOW: Final = r"^[1-9][0-9]{0,6}[smhd]$"


def _window(said: str) -> str:
    if not re.fullmatch(WINDOW, said):
        raise ValueError("must be 24h, or another whole number of s, m, h or d")
    return said


CompletionWindow = Annotated[str, AfterValidator(_window), Field(json_schema_extra={"pattern": WINDOW})]


class BatchRequest(Body):
    """The body of a new batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: CompletionWindow
    metadata: dict[str, str] | None = None

    @property
    def window_s(self) -> float:
        return float(int(self.completion_window[:-1]) * UNITS[self.completion_window[-1]])

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        if self.window_s > MAX_WINDOW_S:
            words = "completion_window is at most 14d: give 24h, as OpenAI's API has it"
            raise InvalidRequest(words, param="completion_window")
        metadata = self.metadata or {}
        fits = all(len(key) <= MAX_KEY_LEN and len(value) <= MAX_VALUE_LEN for key, value in metadata.items())
        if len(metadata) > MAX_METADATA or not fits:
            words = f"metadata has at most {MAX_METADATA} pairs, of {MAX_KEY_LEN} and {MAX_VALUE_LEN} characters"
            raise InvalidRequest(words, param="metadata")


class BatchRoutes:
    """The handlers of the paths."""

    def __init__(self, batches: Batches, bodies: BodyReader) -> None:
        self._batches = batches
        self._bodies = bodies

    async def create(self, request: Request, tenant: str) -> Response:
        fields, now_s = await self._read(request, tenant), self._batches.clock()
        facts = await self._batches.files.find(tenant, fields.input_file_id) if is_id(fields.input_file_id) else None
        if facts is None or facts.purpose != INPUT:
            words = f"there is no file {fields.input_file_id[:64]!r} for a batch: upload one with the purpose `batch`"
            raise InvalidRequest(words, param="input_file_id")
        batch_id = new_id("batch_", now_s)
        if (key := request.headers.get(IDEMPOTENCY_KEY)) is not None:
            _check_key(key)
            batch_id = await self._batches.jobs.id_by_key(tenant, key, batch_id)
            with suppress(NotFound):  # who asked before got no answer, maybe
                return json_response(shown(await self._batches.jobs.find(tenant, batch_id)), request)
        spec = Spec(
            batch_id,
            tenant,
            fields.endpoint,
            fields.input_file_id,
            now_s,
            fields.window_s,
            fields.completion_window,
            fields.metadata,
        )
        return json_response(shown(await self._batches.jobs.create(spec)), request)

    async def index(self, request: Request, tenant: str) -> Response:
        window = Window.of(request, MAX_BATCHES_LISTED, BATCHES_LISTED)

        async def find(batch_id: str) -> Batch | None:
            try:
                return shown(await self._batches.jobs.find(tenant, batch_id))
            except (NotFound, Unreadable):  # it is asked for by its id to hear more
                return None

        return json_response(await listed(window, await self._batches.jobs.ids(tenant), find), request)

    async def show(self, request: Request, tenant: str) -> Response:
        return json_response(shown(await self._batches.jobs.find(tenant, _id(request))), request)

    async def cancel(self, request: Request, tenant: str) -> Response:
        return json_response(shown(await self._batches.jobs.cancel(tenant, _id(request))), request)

    async def _read(self, request: Request, tenant: str) -> BatchRequest:
        held = self._bodies.hold(tenant)
        try:
            return await self._bodies.read(request, held, partial(read_fields, BatchRequest))
        finally:
            held.release()


def add_batches(app: FastAPI, batches: Batches, bodies: BodyReader) -> None:
    """Add the paths of batches and files to the application."""
    files, routes = FileRoutes(batches), BatchRoutes(batches, bodies)
    of_files = (files.create, files.index, files.show, files.delete, files.content)
    handlers = (*of_files, routes.create, routes.index, routes.show, routes.cancel)
    for (method, path), handler in zip(PATHS, handlers, strict=True):
        app.add_route(path, answering(handler), methods=[method])


def _check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_IDEMPOTENCY_LEN:
        words = f"the header {IDEMPOTENCY_KEY} has 1 to {MAX_IDEMPOTENCY_LEN} characters"
        raise InvalidRequest(words, param=IDEMPOTENCY_KEY)


def _id(request: Request) -> str:
    batch_id: str = request.path_params["batch_id"]
    if not is_id(batch_id):
        raise NotFound(f"there is no batch {batch_id[:64]!r}")
    return batch_id


def shown(job: Job) -> Batch:
    """Return what a client sees of a batch."""
    spec, closed, ended, status = job.spec, job.closed, job.ended, job.status
    return {
        "id": spec.batch_id,
        "object": "batch",
        "endpoint": spec.endpoint,
        "errors": {"object": "list", "data": [_problem(each) for each in job.problems]} if job.problems else None,
        "input_file_id": spec.input_file_id,
        "completion_window": spec.completion_window,
        "status": status,
        "output_file_id": closed.output_file_id if closed and ended and ended.has_output else None,
        "error_file_id": closed.error_file_id if closed and ended and ended.has_errors else None,
        "created_at": int(spec.created_s),
        "in_progress_at": _second(job.validated_s),
        "expires_at": int(spec.expires_s),
        "finalizing_at": _second(job.closed_s),
        "completed_at": _second(job.ended_s) if status == "completed" else None,
        "failed_at": _second(job.ended_s if closed and closed.ending is Ending.FAILED else job.refused_s),
        "expired_at": _second(job.ended_s) if status == "expired" else None,
        "cancelling_at": _second(job.cancelled_s),
        "cancelled_at": _second(job.ended_s) if status == "cancelled" else None,
        "request_counts": {"total": job.total, "completed": job.num_done, "failed": job.num_failed},
        "metadata": dict(spec.metadata) if spec.metadata is not None else None,
    }


def _problem(problem: Problem) -> BatchError:
    return {"code": problem.code, "message": problem.message, "line": problem.line, "param": problem.param}


def _second(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
