"""Lets through to the application who carries an API key, before a byte of the body is read.

Probes need none: who asks for them is a kubelet or a load balancer. Nor does the word where metrics are.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.errors import DiptychError
from diptych.router.errors import PermissionDenied
from diptych.router.http.exchange.answers import refusal
from diptych.router.keys.caller import ANYBODY, SCHEME, Caller, Callers
from diptych.router.workers.drain import OPERATORS_PATHS

OPEN_PATHS: Final = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/startup", "/ready", "/ping"),
        *("/", "/version", "/metrics", "/openapi.json"),
    }
)
FOR_ADMINS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", *OPERATORS_PATHS)
CALLER: Final = "diptych.caller"  # in the scope


def with_keys(app: ASGIApp, callers: Callers) -> ASGIApp:
    """Return the application for who has a key of these."""

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await app(scope, receive, send)
        request = Request(scope)
        try:
            scope[CALLER] = _admit(request, callers)
        except DiptychError as error:
            return await refusal(error, request)(scope, receive, send)
        return await app(scope, receive, send)

    return gate


def _admit(request: Request, callers: Callers) -> Caller:
    caller = callers.identify(_authorization(request))
    if request.scope["path"].startswith(FOR_ADMINS) and not caller.is_admin:
        callers.refusals["no_admin"] += 1
        raise PermissionDenied(f"the key {caller.name!r} may not do this: use one with `admin = true`")
    return caller


def _authorization(request: Request) -> str | None:
    """Anthropic's clients have a header of their own for the key."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") if key is None else f"{SCHEME} {key}"


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CALLER, ANYBODY)
    return caller
