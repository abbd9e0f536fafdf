"""From a request of one of the generation APIs to the answer that will serve it, or to an error in that API's words."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError
from diptych.router.http.answer import StreamAnswer, WholeAnswer
from diptych.router.http.ask import Origin, Parse
from diptych.router.http.body import BodyLimits, read_body
from diptych.router.http.errors import ErrorBody, error_body, error_response
from diptych.router.http.key_gate import caller_of
from diptych.router.http.request_id import HEADER, request_id_of
from diptych.router.http.traced import trace_of
from diptych.router.outcome import outcome_of
from diptych.router.pipeline import Pipeline
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

    def __init__(self, pipeline: Pipeline, limits: BodyLimits) -> None:
        self._pipeline = pipeline
        self.limits = limits

    async def answer(self, request: Request, api: Api) -> Response:
        trace = trace_of(request.scope)
        origin = Origin(request_id_of(request), request.headers, caller_of(request), trace)
        if trace is not None:
            trace.attributes[REQUEST_ID] = origin.request_id
        headers = {HEADER: origin.request_id, api.id_header: origin.request_id}
        try:
            ask = api.parse(await read_body(request, self.limits), origin, self._pipeline.model)
        except DiptychError as error:
            self._pipeline.metrics.requests.labels(api.name, outcome_of(error)).inc()
            if trace is not None:
                trace.outcome = outcome_of(error)
            return error_response(error, headers, api.error_body)
        if trace is not None:
            trace.attributes["gen_ai.request.stream"] = ask.stream
        kind = StreamAnswer if ask.stream else WholeAnswer
        return kind(self._pipeline, api.name, ask, headers)
