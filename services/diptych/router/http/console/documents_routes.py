"""The documents as JSON: what the stream tells, for programs; each says what it is of by `scope`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.errors import InvalidRequest, NotFound
from diptych.common.trust.operator_route import number
from diptych.router.console.calls.request_rows import RowFilter
from diptych.router.console.feed import StepLog
from diptych.router.console.hub import Hub
from diptych.router.console.pieces import Pieces, encoded
from diptych.router.console.state import FleetState, RequestList, RequestStory, Steps
from diptych.router.console.turns import in_turns
from diptych.router.http.console.guard import Guard, json_answer, json_bytes
from diptych.router.http.console.relay import Elsewhere
from diptych.router.http.console.stream import live_stream

API: Final = "/console/api"
MAX_STEPS: Final = 65_536  # of one answer
STORY_DEPTH: Final = 6  # its attempts are lists, each with all pairs
STATUSES_S: Final = 1.0  # at most, until workers have told what only they know
Scope = Literal["here", "all"]


class Me(TypedDict):
    """The answer of /console/api/me."""

    is_operator: bool
    text_allowed: bool
    is_open: bool  # nobody needs to sign in


class Documents(Protocol):
    """The documents that differ between one process and all routers."""

    async def requests(self, rows: RowFilter) -> RequestList: ...

    async def story(self, request_id: str) -> RequestStory | None: ...

    async def cache(self) -> Any: ...

    async def charts(self) -> Any: ...


class Workers(StepLog, Protocol):
    """What workers tell while somebody looks."""

    async def wait_for_statuses(self, timeout_s: float) -> None:
        """Wait until each has told of itself, for so long at most."""
        ...


def document_routes(
    guard: Guard,
    hub: Hub,
    own_fleet: Callable[[], Pieces[FleetState]],
    workers: Workers,
    scopes: Mapping[Scope, Documents],
    elsewhere: Elsewhere,
    *,
    text_allowed: bool,
) -> Sequence[Route]:
    """Return the paths that show. Whoever asks looks, so that something is gathered for the next answer."""

    async def me(request: Request) -> Response:
        is_operator = guard.is_operator(request)
        return json_answer(Me(is_operator=is_operator, text_allowed=text_allowed, is_open=guard.is_open))

    async def stream(request: Request) -> Response:
        return await elsewhere.stream(request) or live_stream(hub, request)

    async def fleet(request: Request) -> Response:
        hub.look()
        return await _answer(await in_turns(own_fleet()))

    async def steps(request: Request) -> Response:
        hub.look()
        told = await in_turns(steps_from(workers.steps_since, number(request, "since_ms") or 0.0))
        return json_bytes(told)

    async def requests(request: Request) -> Response:
        return await _answer(await _scope(scopes, request).requests(RowFilter.of_query(request.query_params)))

    async def story(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = await _scope(scopes, request).story(request_id)
        if found is None:
            raise NotFound(f"nothing is known of {request_id!r}: it is too long ago, or another router served it")
        return await _answer(found, STORY_DEPTH)

    async def cache(request: Request) -> Response:
        documents = _scope(scopes, request)
        if documents is scopes["all"]:
            hub.look()
            await workers.wait_for_statuses(STATUSES_S)
        return await _answer(await documents.cache())

    async def charts(request: Request) -> Response:
        return await _answer(await _scope(scopes, request).charts())

    handlers = {
        "/me": me,
        "/stream": stream,
        "/fleet": fleet,
        "/steps": steps,
        "/requests": requests,
        "/requests/{request_id:path}": story,
        "/cache": cache,
        "/charts": charts,
    }
    return [guard.route(f"{API}{path}", "GET", handler) for path, handler in handlers.items()]


async def _answer(document: Mapping[str, Any], depth: int = 2) -> Response:
    return json_bytes([await in_turns(encoded(document, depth))])


class _Part(NamedTuple):
    """Steps of one worker, as JSON without the brackets around them."""

    instance: str
    number: int
    text: bytes


def steps_from(steps_since: Callable[[int], tuple[int, Steps]], since_ms: float) -> Pieces[list[bytes]]:
    """Return the steps that began at a moment or later, as parts of JSON; of too many the newest, `MAX_STEPS`."""
    parts: deque[_Part] = deque()
    cursor, num_kept = 0, 0
    while (told := steps_since(cursor))[0] != cursor:
        cursor, steps = told
        parts += (new := [*_parts(steps, since_ms)])
        num_kept += sum(part.number for part in new)
        while num_kept > MAX_STEPS:
            num_kept -= parts.popleft().number
        yield
    found: dict[str, list[bytes]] = {}
    for part in parts:
        found.setdefault(part.instance, []).append(part.text)
    yield
    return [b'{"workers":{', *_joined(found), b"}}"]


def _joined(found: Mapping[str, Sequence[bytes]]) -> Iterator[bytes]:
    before = b""
    for name, texts in found.items():
        yield b'%b"%b":[' % (before, name.encode())
        yield b",".join(texts)
        yield b"]"
        before = b","


def _parts(steps: Steps, since_ms: float) -> Iterator[_Part]:
    for instance, told in steps["workers"].items():
        if kept := [step for step in told if step[0] >= since_ms]:
            yield _Part(instance, len(kept), orjson.dumps(kept)[1:-1])


def _scope(scopes: Mapping[Scope, Documents], request: Request) -> Documents:
    """Return the documents that are asked for: of all routers, unless the query says otherwise."""
    scope = request.query_params.get("scope", "all")
    if scope not in scopes:
        raise InvalidRequest(f"scope is 'here' or 'all', not {scope!r}", param="scope")
    return scopes[cast(Scope, scope)]
