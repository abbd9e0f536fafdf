from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from diptych.common.errors import ConfigError
from diptych.router.tracing.otlp import OtlpExport
from diptych.router.tracing.tracer import export_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "router", "OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_is_traced_unless_an_endpoint_is_named(environ: Mapping[str, str]) -> None:
    assert export_of(environ) is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_endpoint_switches_traces_on(name: str) -> None:
    assert export_of({name: "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is OtlpExport


def test_another_protocol_is_refused_unless_it_is_that_of_other_signals() -> None:
    http = {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(ConfigError, match="OTLP over grpc, not 'http/protobuf'"):
        export_of(http)
    assert export_of({**http, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}) is OtlpExport


def test_an_endpoint_without_the_packages_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "diptych.router.tracing.otlp")
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_ENDPOINT is set, .*: pip install 'diptych\[otel\]'"):
        export_of(ENDPOINT)


@pytest.mark.integration
def test_a_router_that_nobody_traces_imports_nothing_for_it() -> None:
    """Neither the SDK nor an exporter; the API comes with the web framework."""
    program = "import sys, diptych.router.main; print([n for n in sys.modules if n.startswith('opentelemetry.')])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert not [name for name in eval(found.stdout) if name.split(".")[1] in ("sdk", "exporter", "proto")]
