"""Exports traces by OTLP over gRPC. The one module that knows OpenTelemetry; its SDK reads the environment itself.

The SDK sends from a thread of its own, and drops what a collector doesn't take in time: no request waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from diptych.router.tracing.record import CallTrace, Span, parts_of, span_of

CLOSE_S: Final = 2.0  # for a collector to take what is left when the router ends
SERVICE: Final = "diptych-router"


class OtlpExport:
    """An `Export` to the collector that the environment names."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        """`attributes` describe this process; what the environment says of it counts more."""
        self._exporter = OTLPSpanExporter()
        self._provider = TracerProvider(resource=_resource(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("diptych.router", version("diptych"))
        self._propagator = TraceContextTextMapPropagator()

    def add(self, call: CallTrace) -> None:
        parent = self._propagator.extract(call.parent, Context())
        whole = self._start(span_of(call), parent, SpanKind.SERVER, call)
        if whole.is_recording():  # else it is none of those that the sampler takes
            call.trace_id = f"{whole.get_span_context().trace_id:032x}"
            for part in parts_of(call):
                self._add(part, set_span_in_context(whole, Context()), call)
        whole.end(_ns(call, call.end_s))

    def _add(self, span: Span, parent: Context, call: CallTrace) -> None:
        made = self._start(span, parent, SpanKind.INTERNAL, call)
        for child in span.children:
            self._add(child, set_span_in_context(made, Context()), call)
        made.end(_ns(call, span.ended_s))

    def _start(self, span: Span, parent: Context, kind: SpanKind, call: CallTrace) -> trace.Span:
        made: trace.Span = self._tracer.start_span(
            span.name, parent, kind, span.attributes, start_time=_ns(call, span.begun_s)
        )
        for event in span.events:
            made.add_event(event.name, timestamp=_ns(call, event.at_s))
        if span.is_failure:
            made.set_status(StatusCode.ERROR)
        return made

    async def close(self) -> None:
        """Send what is left. A collector that doesn't answer gets `CLOSE_S`."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, CLOSE_S)
        if sending.is_alive():
            self._exporter.shutdown(timeout_millis=0)  # and `sending` ends soon


def _ns(call: CallTrace, at_s: float) -> int:
    """Return a time of a call on the wall's clock, by the call's beginning: a clock set meanwhile moves nothing."""
    return call.begun_ns + round((at_s - call.begun_s) * 1e9)


def _resource(attributes: Mapping[str, str]) -> Resource:
    said = OTELResourceDetector().detect().attributes
    ours = {"service.name": SERVICE, "service.version": version("diptych"), **attributes}
    return Resource.create({name: value for name, value in ours.items() if name not in said})
