"""Tells Prometheus about each process: its version, and how long its certificate is good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Info

from diptych.common.version import own_version

if TYPE_CHECKING:
    from diptych.common.trust.tls import Tls


def register_version(registry: CollectorRegistry) -> None:
    """Register `diptych_build_info`."""
    Info("diptych_build", "1, with the version of Diptych", registry=registry).info({"version": own_version()})


def register_certificate_expiry(registry: CollectorRegistry, tls: Tls | None) -> None:
    """Register when our certificate ends, as its file is at each scrape; nothing where there is none."""
    if tls is not None:
        words = "When the certificate between components ends, in seconds since 1970"
        gauge = Gauge("diptych_tls_certificate_expires_timestamp_seconds", words, registry=registry)
        gauge.set_function(lambda: tls.current().expires_s)
