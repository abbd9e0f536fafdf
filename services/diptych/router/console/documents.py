"""The documents of the console, of this process alone and of all routers together.

Each process of a router knows the fleet by itself, but only its own calls, and what it counted. So others are asked:
by `AllRouters.ask_others` while somebody looks, and for each answer of an endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, Protocol, cast
from urllib.parse import quote

from diptych.router.console.cache_state import cache_of
from diptych.router.console.history import charts_of
from diptych.router.console.request_rows import ALL, RowFilter, merged
from diptych.router.console.state import CacheCounts, CacheState, ChartCounts, Charts, RequestList, RequestStory

PATHS: Final = {  # of what others are asked for, by topic
    "requests": "/console/api/requests?scope=here",
    "cache": "/console/api/cache?scope=here",
    "charts": "/console/api/charts?scope=here",
}

Json = Mapping[str, Any]


class Calls(Protocol):
    """The calls of this process, as `calls.Calls` has them."""

    def want(self, now_s: float) -> None: ...

    def requests(self, rows: RowFilter) -> RequestList: ...

    def story(self, request_id: str) -> RequestStory | None: ...


class Counts(Protocol):
    """What this process counted, as `history.History` has it."""

    def counts(self) -> ChartCounts: ...


class Cache(Protocol):
    """What this process knows of caches, as `cache_state.CacheView` does."""

    def counts(self, now_s: float) -> CacheCounts: ...


class Others(Protocol):
    """The other routers, as `other_routers.OtherRouters` asks them."""

    async def ask(self, path_and_query: str) -> Mapping[int, Any]:
        """Return what those say who have an answer."""
        ...


class ThisProcess:
    """The documents of this process alone. Who asks for calls looks, so that they are followed."""

    def __init__(
        self, calls: Calls, history: Counts, caches: Cache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._calls = calls
        self._history = history
        self._caches = caches
        self._clock = clock

    async def requests(self, rows: RowFilter) -> RequestList:
        return self.requests_now(rows)

    async def story(self, request_id: str) -> RequestStory | None:
        return self._calls.story(request_id)

    async def cache(self) -> CacheCounts:
        return self.cache_now()

    async def charts(self) -> ChartCounts:
        return self.charts_now()

    def requests_now(self, rows: RowFilter = ALL) -> RequestList:
        self._calls.want(self._clock())
        return self._calls.requests(rows)

    def cache_now(self) -> CacheCounts:
        return self._caches.counts(self._clock())

    def charts_now(self) -> ChartCounts:
        return self._history.counts()


class AllRouters:
    """The documents of all routers. What others said last is remembered for who follows a topic."""

    def __init__(self, here: ThisProcess, others: Others) -> None:
        self._here = here
        self._others = others
        self._said: dict[str, Sequence[Json]] = {}  # by topic

    async def requests(self, rows: RowFilter) -> RequestList:
        said = await self._ask(f"{PATHS['requests']}&{rows.query()}")
        return merged([self._here.requests_now(rows), *cast(Sequence[RequestList], said)], rows.limit)

    async def story(self, request_id: str) -> RequestStory | None:
        if (story := await self._here.story(request_id)) is not None:
            return story
        path, _, query = PATHS["requests"].partition("?")
        said = cast(Sequence[RequestStory], await self._ask(f"{path}/{quote(request_id, safe='')}?{query}"))
        return max(said, key=lambda each: each["row"]["arrived_unix_s"], default=None)

    async def cache(self) -> CacheState:
        return self._cache_of(await self._ask(PATHS["cache"]))

    async def charts(self) -> Charts:
        return self._charts_of(await self._ask(PATHS["charts"]))

    # for who follows

    async def ask_others(self, topics: Set[str]) -> None:
        """Hear what others have of these topics now."""
        names = [name for name in PATHS if name in topics]
        answers = await asyncio.gather(*(self._ask(PATHS[name]) for name in names))
        self._said = dict(zip(names, answers, strict=True))

    def requests_now(self) -> RequestList:
        said = cast(Sequence[RequestList], self._said.get("requests", ()))
        return merged([self._here.requests_now(), *said], ALL.limit)

    def cache_now(self) -> CacheState:
        return self._cache_of(self._said.get("cache", ()))

    def charts_now(self) -> Charts:
        return self._charts_of(self._said.get("charts", ()))

    async def _ask(self, path: str) -> Sequence[Json]:
        return [*(await self._others.ask(path)).values()]

    def _cache_of(self, said: Sequence[Json]) -> CacheState:
        return cache_of([self._here.cache_now(), *cast(Sequence[CacheCounts], said)])

    def _charts_of(self, said: Sequence[Json]) -> Charts:
        return charts_of([self._here.charts_now(), *cast(Sequence[ChartCounts], said)])
