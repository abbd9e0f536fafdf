"""From a request of one of the generation APIs to its answer, as a whole or as server-sent events.

A stream's status line waits for its first token, so that whatever fails before is an ordinary error with a status; what
fails later is an event. Either way the client gets an answer. When the client leaves, the request is aborted at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.common.errors import DiptychError, InternalError
from diptych.router.admission.body_budget import HeldBody
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.http.exchange.answers import HEADER, error_body, error_response, request_id_of
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.layout import Layout
from diptych.router.http.exchange.parse import Origin, Parse, Parsed
from diptych.router.http.exchange.traced import trace_of
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.response import Batch, Stream, interleave, wholes
from diptych.router.values.output import Usage, choose_best, total_usage
from diptych.router.values.request import ClientRequest, GenerationRequest

logger = logging.getLogger(__name__)

EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]
WEIGHTS_HEADER: Final = "x-diptych-weights-version"  # what the weights are called that made an answer, as in URLs
COLD_HEADER: Final = "x-diptych-waited-for-workers-s"
OUR_BUG: Final = "internal error; the router's log has the details"
Headers: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask for generated text."""

    name: str  # in metrics
    path: str
    parse: Parse
    id_header: str = HEADER  # where clients look for the request's id, beside ours


@dataclass(eq=False, repr=False)
class Answer(Response, ABC):
    """A response that does its work when it is sent. No word to `Response`: its own body and headers are not sent."""

    _pipeline: Pipeline
    _api: Api
    _request: ClientRequest
    _layout: Layout
    _given_headers: Headers
    _on_end: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            outcome = await until_disconnect(receive, self._serve(scope, receive, send)) or DISCONNECTED
        finally:
            self._on_end()
        self._pipeline.metrics.requests.labels(self._api.name, outcome).inc()
        self._request.trace.note_outcome(outcome)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> str:
        try:
            async with self._pipeline.admit(self._request) as requests:
                self._layout.prompts = prompts_of(requests, self._request)
                if cold_s := requests[0].cold_s:
                    self._given_headers = {**self._given_headers, COLD_HEADER: f"{cold_s:.1f}"}
                await self._respond(requests, send)
            return OK
        except DiptychError as error:
            failure = error
        except Exception:
            logger.exception("request %s failed", self._request.life.request_id)
            failure = InternalError(OUR_BUG)
        try:
            await self._fail(failure, scope, receive, send)
            return outcome_of(failure)
        finally:
            del failure  # its traceback has this frame: the two would keep each other, and the request

    def _said_headers(self) -> Headers:
        """Return those of an answer that has begun."""
        version = self._request.served_by.weights_version
        return {**self._given_headers, WEIGHTS_HEADER: quote(version, safe=" ")} if version else self._given_headers

    async def _fail(self, error: DiptychError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error, self._api.path, self._given_headers)
        await response(scope, receive, send)

    @abstractmethod
    async def _respond(self, requests: Sequence[GenerationRequest], send: Send) -> None: ...


class WholeAnswer(Answer):
    """One JSON object, when all is known."""

    async def _respond(self, requests: Sequence[GenerationRequest], send: Send) -> None:
        streams = [self._pipeline.generate(request) for request in requests]
        await self._send(await whole_body(self._request, self._layout, streams), send)

    async def _send(self, body: bytes, send: Send) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [*_raw(self._said_headers()), (b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass(eq=False, repr=False)
class StreamAnswer(Answer):
    """Server-sent events. Everything that is ready goes into one write."""

    _started: bool = False
    _opened: set[int] = field(default_factory=set)
    _usages: dict[int, Usage] = field(default_factory=dict)

    async def _respond(self, requests: Sequence[GenerationRequest], send: Send) -> None:
        events: list[bytes] = []
        async with aclosing(interleave([self._pipeline.generate(request) for request in requests])) as batches:
            async for batch in batches:
                events = self._events(batch)
                if len(self._usages) < len(requests):
                    await self._write(b"".join(events), send, more=True)
        # after the last write the exchange looks as if the client had left: nothing may wait any more
        await self._write(b"".join([*events, *self._closing()]), send, more=False)

    def _events(self, batch: Batch) -> list[bytes]:
        events, layout = [], self._layout
        for index, piece in batch:
            is_first = index not in self._opened
            self._opened.add(index)
            events += [layout.framing.event(chunk) for chunk in layout.chunks(index, piece, is_first=is_first)]
            if piece.end:
                self._usages[index] = piece.end.usage
        return events

    def _closing(self) -> list[bytes]:
        layout, usages = self._layout, [usage for _, usage in sorted(self._usages.items())]
        closing = layout.closing(total_usage(usages, self._request.num_made))
        return [*map(layout.framing.event, closing), layout.framing.end]

    async def _write(self, body: bytes, send: Send, *, more: bool) -> None:
        if not body:
            return
        if not self._started:
            self._started = True
            headers = [*_raw(self._said_headers()), *EVENT_STREAM]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: DiptychError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            failure = self._layout.failure(error_body(error, self._api.path))
            await self._write(self._layout.framing.event(failure), send, more=False)
        else:
            await super()._fail(error, scope, receive, send)


class Exchange:
    """Turns requests into answers."""

    def __init__(self, models: Models, bodies: BodyReader) -> None:
        self._models = models
        self.bodies = bodies

    async def answer(self, api: Api, request: Request) -> Response:
        trace, said = trace_of(request.scope), _headers(request.scope)
        origin = Origin(request_id_of(said), said, caller_of(request), trace)
        trace.note_origin(origin.request_id, origin.caller.name)
        headers = {HEADER: origin.request_id, api.id_header: origin.request_id}
        held = self.bodies.hold(origin.caller.name)
        try:
            parsed, pipeline = await self._read(request, api, origin, held)
        except DiptychError as error:
            self._models.metrics.requests.labels(api.name, outcome_of(error)).inc()
            trace.note_outcome(outcome_of(error))
            return error_response(error, api.path, headers)
        trace.note_parsed(parsed[0].stream)
        kind = StreamAnswer if parsed[0].stream else WholeAnswer
        return kind(pipeline, api, *parsed, headers, held.release)

    async def _read(self, request: Request, api: Api, origin: Origin, held: HeldBody) -> tuple[Parsed, Pipeline]:
        """Return also who serves it. What goes wrong here is the end of the request."""
        offers = self._models.now()

        def parse(body: bytes) -> Parsed:
            origin.trace.mark("read")
            return api.parse(body, origin, offers.model)

        try:
            parsed = await self.bodies.read(request, held, parse)
            return parsed, offers.named(parsed[0].model).pipeline
        except BaseException:
            held.release()
            raise


async def whole_body(client: ClientRequest, layout: Layout, streams: Sequence[Stream]) -> bytes:
    """Return the one JSON object that says all of a client's outputs."""
    outputs = await wholes(streams)
    usage = total_usage([output.end.usage for output in outputs], client.num_made)
    return orjson.dumps(layout.whole(choose_best(outputs, client.num_made, client.num_choices), usage))


def prompts_of(requests: Sequence[GenerationRequest], client: ClientRequest) -> list[Sequence[int]]:
    """Return the prompt of each output that is shown."""
    shown = [request.prompt.shown_ids for request in requests[:: client.num_made]]  # made once: with images it is long
    return [ids for ids in shown for _ in range(client.num_choices)]


def _raw(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name. Starlette looks through all of them for each name that is asked for."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
