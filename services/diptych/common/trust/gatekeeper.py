"""Lets a call of a gRPC server pass if it carries a token that it is for, before anything of the call is read.

Health checks pass without one: a kubelet or a load balancer asks, and learns a single word. Watching the health of a
service needs one, because streams of strangers would take the place of others' calls. Open calls of strangers, checks
and refusals, have few places of their own. An honest one is over at once; one that stays for long sends nothing or
reads nothing, and a new call gets the place of the oldest.

What a member may do to itself alone, and what its certificate is for, is checked in the call, where its origin is
known. With certificates, messages of streams pass through one more generator for that; otherwise none is added.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from diptych.common.net.raw_calls import Handler, run_raw
from diptych.common.net.reachable import one_spelling, peer_host
from diptych.common.trust.trust import Reason, Refused, Trust
from diptych.common.verdicts.permissions import Parties, may_call, may_call_itself, words_for

if TYPE_CHECKING:  # clients count none, and need no Prometheus
    from diptych.common.refusals import Refusals

OPEN_TO_ALL: Final = "/grpc.health.v1.Health/Check"
NUM_PLACES: Final = 256  # of strangers

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"

_CODES: Final[Mapping[Reason, grpc.StatusCode]] = {
    "no_token": grpc.StatusCode.UNAUTHENTICATED,
    "wrong_token": grpc.StatusCode.UNAUTHENTICATED,
    "not_permitted": grpc.StatusCode.PERMISSION_DENIED,
}
_KINDS: Final = ("unary", "stream")


class Place:
    """What one call holds."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end
        self.is_lost = False  # to a newcomer


class Strangers:
    """The calls of strangers that are open at a server."""

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_places = num_places
        self._occupied: dict[Place, None] = {}  # oldest first

    @contextlib.contextmanager
    def place(self, end: Callable[[], object]) -> Generator[Place, None, None]:
        """Hold a place, until a newcomer takes it: then `end` is called."""
        if len(self._occupied) >= self._num_places:
            self._displace(next(iter(self._occupied)))
        place = Place(end)
        self._occupied[place] = None
        try:
            yield place
        finally:
            self._occupied.pop(place, None)

    def _displace(self, place: Place) -> None:
        del self._occupied[place]
        place.is_lost = True
        place.end()


class Gatekeeper(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls with UNAUTHENTICATED or PERMISSION_DENIED and words that say what to change."""

    def __init__(self, trust: Trust, refusals: Refusals, own_host: str = "") -> None:
        """`own_host` is what others reach us by."""
        self._trust = trust
        self._refusals = refusals
        self._strangers = Strangers()
        self._own_host = one_spelling(own_host)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        method = handler_call_details.method
        authorization = authorization_of(handler_call_details.invocation_metadata)
        parties = self._trust.parties(authorization)
        if method == OPEN_TO_ALL:
            handler = await continuation(handler_call_details)
            if parties:
                return handler
            return as_stranger(self._strangers, partial(run_raw, handler), handler.response_serializer)
        refused = self._trust.refused(authorization, method)
        if refused and not may_call_itself(parties, method):
            return as_stranger(self._strangers, partial(self._refuse, refused, method))
        handler = await continuation(handler_call_details)
        if handler is None or (refused is None and self._trust.tls is None):
            return handler
        return _with_check(handler, partial(self._check, method))

    async def _check(self, method: str, context: Any) -> None:
        """End a call that its caller may not make."""
        parties = parties_of(self._trust, context)
        is_from_here = bool(self._own_host) and peer_host(context.peer()) == self._own_host
        if not (may_call(parties, method) or (is_from_here and may_call_itself(parties, method))):
            await self._refuse(Refused("not_permitted", words_for(parties, method)), method, None, context)

    async def _refuse(self, refused: Refused, method: str, _: object, context: Any) -> None:
        self._refusals.note(refused.reason, context.peer(), method)
        await context.abort(_CODES[refused.reason], refused.words)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return what a call's metadata says of it."""
    found = dict(metadata or ()).get("authorization")
    return str(found) if found else None


def parties_of(trust: Trust, context: Any) -> Parties:
    """Return what a caller is by its token and by its certificate: what both say."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    by_token = trust.parties(authorization_of(context.invocation_metadata()))
    return by_token & trust.certified(name.decode(errors="replace") for name in names)


def as_stranger(
    strangers: Strangers, behaviour: Callable[[Any, Any], Awaitable[None]], serializer: Any = None
) -> Handler:
    """Return what runs `behaviour` in a place for strangers.

    Such a handler runs before the first message has come, and its status ends calls of every kind.
    """

    async def run(requests: Any, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call is a task"
        with strangers.place(task.cancel) as place:
            try:
                await behaviour(requests, context)
            except asyncio.CancelledError:
                if not place.is_lost:
                    raise
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others came since: send your message at once")

    return grpc.stream_stream_rpc_method_handler(run, response_serializer=serializer)


def _with_check(
    handler: grpc.RpcMethodHandler[Any, Any], check: Callable[[Any], Awaitable[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that looks at its caller first."""
    kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
    work: Any = getattr(handler, kind)

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await work(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async with aclosing(work(request, context)) as messages:
            async for message in messages:
                yield message

    checked = stream if inspect.isasyncgenfunction(work) else answer
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(checked, handler.request_deserializer, handler.response_serializer)
    return made
