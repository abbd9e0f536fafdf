"""Traces of requests by OpenTelemetry, made after a request's end from times that were kept on the way."""
