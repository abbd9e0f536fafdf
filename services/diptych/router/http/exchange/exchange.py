"""From a request of one of the generation APIs to the answer that will serve it, or to an error in that API's words."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from diptych.common.errors import DiptychError
from diptych.router.admission.body_budget import HeldBody
from diptych.router.errors import outcome_of
from diptych.router.http.exchange.answer import StreamAnswer, WholeAnswer
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.errors import ErrorBody, error_body, error_response
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import Origin, Parse, Parsed
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.http.exchange.traced import trace_of
from diptych.router.serve.pipeline import Pipeline
from diptych.router.tracing.record import REQUEST_ID


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask for generated text."""

    name: str  # in metrics
    path: str
    parse: Parse
    error_body: ErrorBody = error_body
    id_header: str = HEADER  # where clients look for the request's id, beside ours


class Exchange:
    """Turns requests into answers."""

    def __init__(self, pipeline: Pipeline, bodies: BodyReader) -> None:
        self._pipeline = pipeline
        self.bodies = bodies

    async def answer(self, request: Request, api: Api) -> Response:
        trace = trace_of(request.scope)
        origin = Origin(request_id_of(request), _headers(request.scope), caller_of(request), trace)
        trace.note({REQUEST_ID: origin.request_id})
        headers = {HEADER: origin.request_id, api.id_header: origin.request_id}
        held = self.bodies.hold(origin.caller.name)
        try:
            parsed = await self._read(request, api, origin, held)
        except DiptychError as error:
            self._pipeline.metrics.requests.labels(api.name, outcome_of(error)).inc()
            trace.note_outcome(outcome_of(error))
            return error_response(error, headers, api.error_body)
        trace.note({"gen_ai.request.stream": parsed[0].stream})
        kind = StreamAnswer if parsed[0].stream else WholeAnswer
        return kind(self._pipeline, api.name, parsed, headers, on_end=held.release)

    async def _read(self, request: Request, api: Api, origin: Origin, held: HeldBody) -> Parsed:
        """What goes wrong here is the end of the request."""
        model = self._pipeline.model
        try:
            return await self.bodies.read(request, held, lambda body: api.parse(body, origin, model))
        except BaseException:
            held.release()
            raise


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name. Starlette looks through all of them for each name that is asked for."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
