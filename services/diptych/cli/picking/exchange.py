"""One request of a gateway in the words of Envoy's external processing: what to answer to each message. Pure.

After the endpoint picker protocol of the Gateway API inference extension (proposal 004, version 1.0.0): the endpoint is
told by a header and by dynamic metadata, alike; a subset that the gateway names is kept to; without an endpoint the
answer is 503. The choice needs headers only, so bodies are passed on, untouched, as the gateway's mode wants it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from google.protobuf.struct_pb2 import ListValue, Struct

from diptych.cli.picking.choice import Routers
from diptych.router.values.request import MAX_SESSION_LEN, SESSION_HEADER
from diptych.v1.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    OVERWRITE_IF_EXISTS_OR_ADD,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_SPACE: Final = "envoy.lb.subset_hint"
SPACE: Final = "envoy.lb"
NOBODY: Final = "no router is ready that this request may go to; try again"


class Exchange:
    """A request, from its headers to its end."""

    def __init__(self, routers: Routers, request_id: str) -> None:
        """`request_id` is another one for each."""
        self._routers = routers
        self._request_id = request_id
        self._modes: tuple[int, int] = (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED)  # which every picker must know
        self._counted = ""  # the endpoint that has this request
        self._ended: set[str] = set()  # bodies passed on: Envoy may tell a last piece twice (its issue 46237)

    def answer(self, request: ProcessingRequest) -> ProcessingResponse | None:
        """Return what to say to a message; None: nothing."""
        if request.HasField("protocol_config"):
            modes = request.protocol_config
            self._modes = modes.request_body_mode, modes.response_body_mode
        response = self._respond(request)
        return None if request.observability_mode else response

    def close(self) -> None:
        """The request has ended, or nobody waits for it any more."""
        self._count("")

    def _respond(self, request: ProcessingRequest) -> ProcessingResponse | None:
        match kind := request.WhichOneof("request"):
            case _ if kind in self._ended:
                return None
            case "request_headers":
                return self._pick(request)
            case "response_headers":
                self._note_who_served(request)
                return ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))
            case "request_body":
                return ProcessingResponse(request_body=self._pass_on(kind, request.request_body, self._modes[0]))
            case "response_body":
                return ProcessingResponse(response_body=self._pass_on(kind, request.response_body, self._modes[1]))
            case "request_trailers":
                return ProcessingResponse(request_trailers=TrailersResponse())
            case "response_trailers":
                return ProcessingResponse(response_trailers=TrailersResponse())
        return None  # of a later version

    def _pass_on(self, kind: str, body: HttpBody, mode: int) -> BodyResponse:
        if mode != FULL_DUPLEX_STREAMED:
            return BodyResponse(response=CommonResponse())  # the gateway has kept it
        if body.end_of_stream:
            self._ended.add(kind)
        piece = StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
        return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))

    def _pick(self, request: ProcessingRequest) -> ProcessingResponse:
        session = _header(request.request_headers.headers, SESSION_HEADER)[:MAX_SESSION_LEN]
        endpoints = self._routers.pick(_subset(request), session, self._request_id)
        if not endpoints:
            return _refusal()
        if not request.observability_mode:
            self._count(endpoints[0])
        return _destination(",".join(endpoints))

    def _note_who_served(self, request: ProcessingRequest) -> None:
        """Another one, where the first did not answer."""
        space = request.metadata_context.filter_metadata.get(SPACE)
        served = space[SERVED] if space is not None and SERVED in space else ""
        if self._counted and isinstance(served, str) and served:
            self._count(served)

    def _count(self, endpoint: str) -> None:
        if self._counted:
            self._routers.end(self._counted)
        if endpoint:
            self._routers.begin(endpoint)
        self._counted = endpoint


def _header(headers: HeaderMap, name: str) -> str:
    for each in headers.headers:
        if each.key.lower() == name:
            return each.value or each.raw_value.decode(errors="replace")
    return ""


def _subset(request: ProcessingRequest) -> Collection[str] | None:
    """Return the endpoints that the gateway allows; None: it says nothing. A list, or a text with commas."""
    space = request.metadata_context.filter_metadata.get(SUBSET_SPACE)
    if space is None or SUBSET not in space:
        return None
    named = space[SUBSET]
    texts = named if isinstance(named, ListValue) else str(named or "").split(",")
    return {str(each).strip() for each in texts}


def _destination(endpoints: str) -> ProcessingResponse:
    metadata = Struct()
    metadata.update({SPACE: {DESTINATION: endpoints}})
    common = CommonResponse(header_mutation=_set(DESTINATION, endpoints), clear_route_cache=True)
    return ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)


def _refusal() -> ProcessingResponse:
    """In the words of a router that has no pair."""
    body = json.dumps({"error": {"message": NOBODY, "type": "unavailable", "param": None, "code": None}})
    headers = HeaderMutation(
        set_headers=[*_set("content-type", "application/json").set_headers, *_set("retry-after", "1").set_headers]
    )
    status = HttpStatus(code=503)
    return ProcessingResponse(
        immediate_response=ImmediateResponse(status=status, headers=headers, body=body.encode(), details="no_router")
    )


def _set(name: str, value: str) -> HeaderMutation:
    header = HeaderValue(key=name, raw_value=value.encode())
    option = HeaderValueOption(header=header, append_action=OVERWRITE_IF_EXISTS_OR_ADD)
    return HeaderMutation(set_headers=[option])
