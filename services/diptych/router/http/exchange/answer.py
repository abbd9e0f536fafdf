"""Answers one request over one HTTP exchange: as a whole, or as server-sent events.

A stream's status line waits for its first token, so that whatever fails before is an ordinary error with a status; what
fails later is an event. Either way the client gets an answer. When the client leaves, the request is aborted at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.common.errors import DiptychError, InternalError
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.errors import error_response
from diptych.router.http.exchange.parse import Parsed
from diptych.router.output import Usage, choose_best, total_usage
from diptych.router.request import ClientRequest, GenerationRequest
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.response import Batch, interleave, wholes

logger = logging.getLogger(__name__)

EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class Answer(Response, ABC):
    """A response that does its work when it is sent."""

    def __init__(
        self, pipeline: Pipeline, api: str, parsed: Parsed, headers: Mapping[str, str], *, on_end: Callable[[], None]
    ) -> None:
        self._pipeline = pipeline  # no word to `Response`: its own body and headers are not sent
        self._api = api
        self._request, self._layout = parsed
        self._given_headers = headers
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            outcome = await until_disconnect(receive, self._serve(scope, receive, send)) or DISCONNECTED
        finally:
            self._on_end()
        self._pipeline.metrics.requests.labels(self._api, outcome).inc()
        self._request.trace.note_outcome(outcome)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> str:
        try:
            async with self._pipeline.admit(self._request) as requests:
                self._layout.prompts = _prompts(requests, self._request)
                await self._respond(requests, send)
            return OK
        except DiptychError as error:
            failure = error
        except Exception:
            logger.exception("request %s failed", self._request.life.request_id)
            failure = InternalError("internal error; the router's log has the details")
        await self._fail(failure, scope, receive, send)
        return outcome_of(failure)

    async def _fail(self, error: DiptychError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error, self._given_headers, self._layout.error_body)
        await response(scope, receive, send)

    @abstractmethod
    async def _respond(self, requests: Sequence[GenerationRequest], send: Send) -> None: ...


class WholeAnswer(Answer):
    """One JSON object, when all is known."""

    async def _respond(self, requests: Sequence[GenerationRequest], send: Send) -> None:
        client, outputs = self._request, await wholes([self._pipeline.generate(request) for request in requests])
        usage = total_usage([output.end.usage for output in outputs], client.num_made)
        choices = choose_best(outputs, client.num_made, client.num_choices)
        await self._send(orjson.dumps(self._layout.whole(choices, usage)), send)

    async def _send(self, body: bytes, send: Send) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [*_raw(self._given_headers), (b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamAnswer(Answer):
    """Server-sent events. Everything that is ready goes into one write."""

    def __init__(
        self, pipeline: Pipeline, api: str, parsed: Parsed, headers: Mapping[str, str], *, on_end: Callable[[], None]
    ) -> None:
        super().__init__(pipeline, api, parsed, headers, on_end=on_end)
        self._started = False
        self._opened: set[int] = set()
        self._usages: dict[int, Usage] = {}

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
            headers = [*_raw(self._given_headers), *EVENT_STREAM]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: DiptychError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            layout = self._layout
            await self._write(layout.framing.event(layout.failure(error)), send, more=False)
        else:
            await super()._fail(error, scope, receive, send)


def _prompts(requests: Sequence[GenerationRequest], client: ClientRequest) -> list[Sequence[int]]:
    """Return the prompt of each output that is shown."""
    return [request.prompt.ids for request in requests[:: client.num_made] for _ in range(client.num_choices)]


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
