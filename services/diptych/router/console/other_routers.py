"""Asks the other routers of the platform for what only they know: the calls that they serve.

Each process of a router is a member of its own, so the processes of one router are asked like those of another. Nobody
is waited for: a router that does not answer soon is left out, and `missing` says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Set
from typing import Any, Final, Protocol, cast
from urllib.parse import quote, urlsplit

import httptools
import orjson

from diptych.common.trust.trust import Trust
from diptych.router.console.calls.calls import Calls
from diptych.router.console.calls.request_rows import RowFilter, list_of, merged
from diptych.router.console.http_answer import HttpAnswer
from diptych.router.console.state import RequestList, RequestStory
from diptych.router.console.turns import in_turns
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

DEADLINE_S: Final = 1.0  # for all of an answer
MAX_ANSWER_BYTES: Final = 16 << 20
OK: Final = 200
REQUESTS_PATH: Final = "/console/api/requests"
HERE: Final = "scope=here"  # of the one who is asked, and of nobody else
FIELDS: Final = RequestStory.__required_keys__

Json = dict[str, Any]


class Routers(Protocol):
    """Who knows the routers, as `Fleet` does."""

    @property
    def router_id(self) -> int: ...

    def routers(self) -> Mapping[int, Instance]: ...


class OtherRouters:
    """All routers but this one."""

    def __init__(self, routers: Routers, trust: Trust, *, deadline_s: float = DEADLINE_S) -> None:
        self._routers = routers
        self._trust = trust
        self._deadline_s = deadline_s
        self.missing: Mapping[int, str] = {}  # who did not answer the last time, and why

    def ids(self) -> Set[int]:
        """Return who can be asked now."""
        return self._routers.routers().keys() - {self._routers.router_id}

    async def ask(self, path_and_query: str) -> Mapping[int, Json]:
        """Return what those say who have an answer. Takes no longer than the deadline, whoever is away."""
        return await self.ask_each(dict.fromkeys(self.ids(), path_and_query))

    async def ask_each(self, paths: Mapping[int, str]) -> Mapping[int, Json]:
        """Do the same with some of `ids()`, and a path and query for each."""
        routers = self._routers.routers()
        answers = await asyncio.gather(*(self._ask(routers[key].address, path) for key, path in paths.items()))
        said = dict(zip(paths, answers, strict=True))
        missing = {key: answer for key, answer in said.items() if isinstance(answer, str)}
        for key in missing.keys() - self.missing.keys():
            logger.info("router %016x at %s does not answer: %s", key, routers[key].address, missing[key])
        not_asked = self.missing.keys() & routers.keys() - paths.keys()
        self.missing = {**{key: self.missing[key] for key in not_asked}, **missing}
        return {key: answer for key, answer in said.items() if isinstance(answer, dict)}

    async def _ask(self, address: str, path_and_query: str) -> Json | str | None:
        """Return the answer; None if it is that there is nothing, and words if there is none."""
        try:
            async with asyncio.timeout(self._deadline_s):
                status, body = await _get(address, path_and_query, self._trust)
            answer = orjson.loads(body) if status == OK else None
        except TimeoutError:
            return f"nothing came for {self._deadline_s:g} s"
        except (OSError, ValueError, httptools.HttpParserError) as error:
            return str(error) or type(error).__name__
        return answer if isinstance(answer, dict) else None


async def requests_of_all(calls: Calls, others: OtherRouters, rows: RowFilter) -> RequestList:
    """Return the calls of all routers that are asked for."""
    answers = await others.ask(f"{REQUESTS_PATH}?{rows.query()}&{HERE}")
    own = await in_turns(calls.requests(rows))
    return merged([own, *map(list_of, answers.values())], rows.limit)


async def story_of_any(calls: Calls, others: OtherRouters, request_id: str) -> RequestStory | None:
    """Return the story of a call, whichever router served it; None if none knows it."""
    if (story := await in_turns(calls.story(request_id))) is not None:
        return story
    answers = await others.ask(f"{REQUESTS_PATH}/{quote(request_id, safe='')}?{HERE}")
    stories = [cast(RequestStory, answer) for answer in answers.values() if answer.keys() >= FIELDS]
    return max(stories, key=lambda story: story["row"]["arrived_unix_s"], default=None)


async def _get(address: str, path_and_query: str, trust: Trust) -> tuple[int, bytes]:
    """Return status and body. Raises `OSError`, `ValueError` and `HttpParserError`."""
    where = urlsplit(f"//{address}")
    answer = HttpAnswer(
        *await asyncio.open_connection(where.hostname, where.port), _head(address, path_and_query, trust)
    )
    try:
        body = bytearray()
        async for piece in answer.pieces():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        return answer.status, bytes(body)
    finally:
        answer.close()


def _head(address: str, path_and_query: str, trust: Trust) -> bytes:
    fields = {"host": address, "accept": "application/json", "connection": "close", **dict(trust.metadata())}
    lines = [f"GET {path_and_query} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
