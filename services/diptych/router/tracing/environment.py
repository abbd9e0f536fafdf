"""Whether traces are wanted: OpenTelemetry's own environment variables say so. Without them nothing of it is imported.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from diptych.common.errors import ConfigError
from diptych.router.tracing.tracer import Export

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first that is set counts

OpenExport = Callable[[Mapping[str, str]], Export]  # of the attributes of this process


def export_of(environ: Mapping[str, str]) -> OpenExport | None:
    """Return how to open the export that `environ` asks for. Raises `ConfigError` if it can't be had."""
    if not _is_wanted(environ):
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"traces go out by OTLP over grpc, not {protocol!r}: see {PROTOCOLS[1]}")
    try:
        from diptych.router.tracing.otlp import OtlpExport
    except ModuleNotFoundError as error:
        words = "is set, but OpenTelemetry is not installed: pip install 'diptych[otel]', or unset it"
        raise ConfigError(f"{_endpoint(environ)} {words} ({error})") from None
    return OtlpExport


def _is_wanted(environ: Mapping[str, str]) -> bool:
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and _endpoint(environ) is not None


def _endpoint(environ: Mapping[str, str]) -> str | None:
    return next((name for name in ENDPOINTS if environ.get(name)), None)
