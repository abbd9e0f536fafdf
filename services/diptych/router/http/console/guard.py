"""Lets through to what is behind the console who may call it, and answers in JSON that nobody keeps.

Who fails again and again is told to wait. A caller with the right token never waits: strangers can lock nobody out.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diptych.common.errors import DiptychError, Overloaded, Unavailable
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import OperatorError
from diptych.common.trust.tokens import Refusal
from diptych.common.trust.trust import INSECURE, Trust
from diptych.common.verdicts.permissions import EVERY, MAY_CALL, Parties, Party
from diptych.router.console.attempts import Attempts
from diptych.router.errors import PermissionDenied, Unauthenticated
from diptych.router.keys.caller import Callers

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

MOST_FAILURES: Final = 60  # of all strangers in a minute
WINDOW_S: Final = 60.0
WORDS: Final[Mapping[Refusal, str]] = {
    "no_token": "no token: sign in with that of an operator or a viewer",
    "wrong_token": "wrong token: compare it with that of an operator or a viewer of this platform",
}
WRITTEN_AT_ONCE: Final = 1 << 16  # bytes
NO_STORE: Final[Mapping[str, str]] = {"cache-control": "no-store"}


class Guard:
    """Who may do what here: as for the routes of operators, by token; by an admin's key where nobody has a token."""

    def __init__(
        self, trust: Trust, callers: Callers | None, refusals: Refusals, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trust = trust
        self._callers = callers if trust == INSECURE else None
        self._refusals = refusals
        self._clock = clock
        self._failures = Attempts(MOST_FAILURES, WINDOW_S)

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything."""
        return self._trust == INSECURE and self._callers is None

    def is_operator(self, request: Request) -> bool:
        """Whether a caller that was let in may act."""
        return Party.OPERATOR in self._parties(request)

    def route(self, path: str, method: str, handler: Handler) -> Route:
        """Return the path. `handler` may raise a `DiptychError`, which becomes the answer."""
        action = f"{method} {path}"
        assert action in MAY_CALL, f"nobody may call {path}"

        async def answer(request: Request) -> Response:
            try:
                self._check(request, action)
                return await handler(request)
            except DiptychError as error:
                return failure(error)

        return Route(path, answer, methods=[method])

    def _parties(self, request: Request) -> Parties:
        authorization = request.headers.get("authorization")
        if self._callers is not None:
            return EVERY if self._callers.identify(authorization).is_admin else frozenset()
        return self._trust.parties(authorization)

    def _check(self, request: Request, action: str) -> None:
        try:
            self._admit(request, action)
        except (PermissionDenied, Unauthenticated):
            now_s = self._clock()
            if wait_s := self._failures.wait_s(now_s):
                words = "too many calls that were refused: try again later"
                raise Overloaded(words, retry_after_s=math.ceil(wait_s)) from None
            self._failures.fail(now_s)
            raise

    def _admit(self, request: Request, action: str) -> None:
        if self._callers is not None:
            if not self._parties(request):
                raise PermissionDenied("this key may not use the console: use one with `admin = true`")
            return
        refused = self._trust.http_refused(request.headers.get("authorization"), action)
        if refused is None:
            return
        peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
        self._refusals.note(refused.reason, peer, action)
        if refused.reason == "not_permitted":
            raise PermissionDenied(refused.words)
        raise Unauthenticated(WORDS[refused.reason])


def json_answer(body: object, status: int = 200, headers: Mapping[str, str] = NO_STORE) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def json_bytes(parts: Sequence[bytes]) -> Response:
    """Return an answer that is JSON already, in parts."""
    return _LongAnswer(parts)


class _LongAnswer(Response):
    """Is written some at a time: all steps are some megabytes, for which no request shall wait."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        length = {"content-length": str(sum(map(len, parts)))}
        super().__init__(None, 200, {**NO_STORE, **length}, "application/json")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        waiting: list[bytes] = []
        for part in itertools.chain.from_iterable(map(_cut, self._parts)):
            waiting.append(part)
            if sum(map(len, waiting)) >= WRITTEN_AT_ONCE:
                await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
                await asyncio.sleep(0)
                waiting = []
        await send({"type": "http.response.body", "body": b"".join(waiting)})


def _cut(part: bytes) -> Iterator[bytes]:
    return (part[begin : begin + WRITTEN_AT_ONCE] for begin in range(0, len(part), WRITTEN_AT_ONCE))


def failure(error: DiptychError) -> Response:
    retry = {"retry-after": str(error.retry_after_s)} if isinstance(error, Overloaded | Unavailable) else {}
    return json_answer(OperatorError(error=str(error)), error.http_status, {**NO_STORE, **retry})
