"""A collector of traces: OTLP over gRPC, in this process. It keeps what it gets, and answers when it may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TIMEOUT_S: Final = 200.0  # only for what hangs: machines may be busy


class Collector:
    """Implements `TraceService`. `spans` come in order: that of a call after those of its parts."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.asked = threading.Event()  # somebody has sent something
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._arrived = threading.Condition()
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        self.asked.set()
        self.may_answer.wait(TIMEOUT_S)
        with self._arrived:
            for batch in request.resource_spans:
                self.resource = values(batch.resource.attributes)
                self.spans += [span for scope in batch.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def calls(self, number: int) -> list[Span]:
        """Wait for the spans of so many calls, and return them."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

        with self._arrived:
            assert self._arrived.wait_for(lambda: len(found()) >= number, TIMEOUT_S), "they never came"
            return found()

    def children(self, parent: Span) -> dict[str, Span]:
        """Return the spans right below one, by name."""
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes if isinstance(each, KeyValue)}


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.stop(None).wait()
