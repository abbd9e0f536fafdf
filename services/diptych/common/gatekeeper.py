"""Lets a call of a gRPC server pass if it carries a token, before anything of the call is read.

Health checks pass without one: who asks is a kubelet or a load balancer, and what they learn is a single word. Watching
the health of a service does not: streams of strangers would take the place of others' calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc

from diptych.common.refusals import Refusals
from diptych.common.tokens import WORDS, Refusal
from diptych.common.trust import Trust

OPEN_TO_ALL: Final = "/grpc.health.v1.Health/Check"


class Gatekeeper(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls with UNAUTHENTICATED and words that say what to change."""

    def __init__(self, trust: Trust, refusals: Refusals) -> None:
        self._trust = trust
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        if method == OPEN_TO_ALL:
            return await continuation(handler_call_details)
        authorization = dict(handler_call_details.invocation_metadata).get("authorization")
        reason = self._trust.refusal(str(authorization) if authorization else None)
        if reason is None:
            return await continuation(handler_call_details)
        # such a handler runs before the first message has come, and its status ends calls of every kind
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, reason, method))

    async def _refuse(self, reason: Refusal, method: str, _: object, context: Any) -> None:
        self._refusals.note(reason, context.peer(), method)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, WORDS[reason])
