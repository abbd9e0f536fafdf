from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from diptych.cli.picking.choice import Routers
from diptych.cli.picking.exchange import DESTINATION, SERVED, SPACE, SUBSET, SUBSET_SPACE, Exchange
from diptych.v1.ext_proc_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

HEADERS = HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key=":path", raw_value=b"/v1/completions")]))


def space(name: str, key: str, value: Any) -> Metadata:
    struct = Struct()
    struct.update({key: value})
    return Metadata(filter_metadata={name: struct})


def saying(kind: str, message: Any) -> ProcessingRequest:
    request = ProcessingRequest()
    getattr(request, kind).SetInParent()
    getattr(request, kind).CopyFrom(message)
    return request


def routers(*endpoints: str) -> Routers:
    found = Routers()
    found.are(endpoints)
    return found


def told(response: ProcessingResponse | None) -> str:
    """Return the endpoints that a gateway is told, in both ways."""
    assert response is not None
    common = response.request_headers.response
    (option,) = common.header_mutation.set_headers
    assert option.header.key == DESTINATION
    endpoints = option.header.raw_value.decode()
    metadata: Any = response.dynamic_metadata
    assert metadata[SPACE][DESTINATION] == endpoints
    assert common.clear_route_cache
    return endpoints


def test_the_endpoint_and_those_after_it_are_told_by_header_and_metadata_alike() -> None:
    found = routers("10.0.0.1:8000", "10.0.0.2:8000")
    found.begin("10.0.0.1:8000")
    answer = Exchange(found, "1").answer(ProcessingRequest(request_headers=HEADERS))
    assert told(answer) == "10.0.0.2:8000,10.0.0.1:8000"


@pytest.mark.parametrize("named", [["10.0.0.2:8000", "10.0.0.9:8000"], "10.0.0.9:8000, 10.0.0.2:8000"])
def test_a_subset_is_kept_to(named: Any) -> None:
    request = ProcessingRequest(request_headers=HEADERS, metadata_context=space(SUBSET_SPACE, SUBSET, named))
    assert told(Exchange(routers("10.0.0.1:8000", "10.0.0.2:8000"), "1").answer(request)) == "10.0.0.2:8000"


@pytest.mark.parametrize("named", [[], "", ["10.0.0.9:8000"], None])
def test_without_an_endpoint_in_the_subset_the_answer_is_503(named: Any) -> None:
    request = ProcessingRequest(request_headers=HEADERS, metadata_context=space(SUBSET_SPACE, SUBSET, named))
    found = routers("10.0.0.1:8000")
    answer = Exchange(found, "1").answer(request)
    assert answer is not None
    assert answer.immediate_response.status.code == 503
    assert b"no router is ready" in answer.immediate_response.body
    assert ("retry-after", b"1") in [
        (each.header.key, each.header.raw_value) for each in answer.immediate_response.headers.set_headers
    ]
    assert not answer.HasField("dynamic_metadata")


def test_without_a_router_the_answer_is_503() -> None:
    answer = Exchange(routers(), "1").answer(ProcessingRequest(request_headers=HEADERS))
    assert answer is not None
    assert answer.immediate_response.status.code == 503


@pytest.mark.parametrize("written", [{"value": "s"}, {"raw_value": b"s"}])
def test_a_session_stays_with_its_router(written: Any) -> None:
    found = routers("10.0.0.1:8000", "10.0.0.2:8000")
    session = HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key="X-Diptych-Session", **written)]))
    request = ProcessingRequest(request_headers=session)
    assert len({told(Exchange(found, str(number)).answer(request)) for number in range(8)}) == 1


@pytest.mark.parametrize("side", ["request", "response"])
def test_bodies_are_passed_on_piece_by_piece_in_full_duplex_and_left_alone_else(side: str) -> None:
    exchange = Exchange(routers("10.0.0.1:8000"), "1")
    exchange.answer(ProcessingRequest(request_headers=HEADERS))  # says no mode
    field = f"{side}_body"
    for body in (HttpBody(body=b"{"), HttpBody(body=b"}", end_of_stream=True)):
        answer = exchange.answer(saying(field, body))
        assert answer is not None
        piece = getattr(answer, field).response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (body.body, body.end_of_stream)
    exchange = Exchange(routers("10.0.0.1:8000"), "2")
    modes = {f"{side}_body_mode": BUFFERED}
    exchange.answer(ProcessingRequest(request_headers=HEADERS, protocol_config=ProtocolConfiguration(**modes)))
    answer = exchange.answer(saying(field, HttpBody(body=b"{}")))
    assert answer is not None
    assert not getattr(answer, field).response.HasField("body_mutation")


@pytest.mark.parametrize("side", ["request", "response"])
def test_a_last_piece_that_is_told_twice_is_passed_on_once(side: str) -> None:
    exchange = Exchange(routers("10.0.0.1:8000"), "1")
    exchange.answer(ProcessingRequest(request_headers=HEADERS))
    last = saying(f"{side}_body", HttpBody(body=b"}", end_of_stream=True))
    assert exchange.answer(last) is not None
    assert exchange.answer(last) is None
    other = {"request": "response_body", "response": "request_body"}[side]
    assert exchange.answer(saying(other, HttpBody(body=b"}", end_of_stream=True))) is not None


def test_each_message_is_answered_by_its_own_kind_and_a_later_one_by_nothing() -> None:
    exchange = Exchange(routers("10.0.0.1:8000"), "1")
    for kind, message in {
        "response_headers": HEADERS,
        "request_trailers": HttpTrailers(),
        "response_trailers": HttpTrailers(),
    }.items():
        answer = exchange.answer(saying(kind, message))
        assert answer is not None
        assert answer.WhichOneof("response") == kind
    assert exchange.answer(ProcessingRequest()) is None


def test_who_only_watches_is_told_nothing_and_counts_nothing() -> None:
    found = routers("10.0.0.1:8000")
    request = ProcessingRequest(request_headers=HEADERS, observability_mode=True)
    assert Exchange(found, "1").answer(request) is None
    assert found.open("10.0.0.1:8000") == 0


def test_a_request_counts_where_it_is_served_until_it_ends() -> None:
    found = routers("10.0.0.1:8000", "10.0.0.2:8000")
    found.begin("10.0.0.2:8000")
    exchange = Exchange(found, "1")
    exchange.answer(ProcessingRequest(request_headers=HEADERS))
    assert [found.open(f"10.0.0.{number}:8000") for number in (1, 2)] == [1, 1]
    served = space(SPACE, SERVED, "10.0.0.2:8000")
    exchange.answer(ProcessingRequest(response_headers=HEADERS, metadata_context=served))
    assert [found.open(f"10.0.0.{number}:8000") for number in (1, 2)] == [0, 2]
    exchange.close()
    exchange.close()
    assert [found.open(f"10.0.0.{number}:8000") for number in (1, 2)] == [0, 1]


def test_a_gateway_that_asks_for_full_duplex_gets_it() -> None:
    exchange = Exchange(routers("10.0.0.1:8000"), "1")
    modes = ProtocolConfiguration(request_body_mode=FULL_DUPLEX_STREAMED)
    exchange.answer(ProcessingRequest(request_headers=HEADERS, protocol_config=modes))
    answer = exchange.answer(ProcessingRequest(request_body=HttpBody(body=b"x")))
    assert answer is not None
    assert answer.request_body.response.body_mutation.streamed_response.body == b"x"
