"""The documents of the console, of this process alone and of all routers together.

Each process of a router knows the fleet by itself, but only its own calls, and what it counted. So others are asked:
by `AllRouters.ask_others` while somebody looks, and for each answer of an endpoint. Who answers with less than is
needed, as another version may, is left out.

Of calls only those are asked for that the list of all has room for, and the less often the more there is to tell: busy
routers have new ones each time. Who is silent once has what it said before, and as many calls are asked of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, Generic, TypeVar, cast

from diptych.router.console.cache.cache_state import CacheView, cache_of
from diptych.router.console.calls.calls import Calls
from diptych.router.console.calls.request_rows import ALL, DEFAULT_ROWS, RowFilter, list_of, merged
from diptych.router.console.history import History, charts_of
from diptych.router.console.other_routers import HERE, REQUESTS_PATH, OtherRouters, requests_of_all, story_of_any
from diptych.router.console.pieces import Pieces
from diptych.router.console.said import Said
from diptych.router.console.state import CacheCounts, CacheState, ChartCounts, Charts, RequestList, RequestStory
from diptych.router.console.turns import in_turns

PATHS: Final = {  # of what others are asked for, by topic
    "requests": f"{REQUESTS_PATH}?{HERE}",
    "cache": f"/console/api/cache?{HERE}",
    "charts": f"/console/api/charts?{HERE}",
}
FOLLOW_AGAIN_S: Final = 60.0  # between two words to others that somebody looks: they follow calls for minutes
AGE_S: Final = {"requests": 0.9, "cache": 20.0, "charts": 9.0}  # of what others said, before they are asked again
ANSWER_S: Final = 1e-3  # of processor time that an answer takes of who asks and who is asked, both together,
ROW_S: Final = 1.5e-5  # and each row of a call in it
ASKING_SHARE: Final = 0.002  # of a core, for asking all of them for calls
SPARE_ROWS: Final = 8  # that a router is asked for though it had none of the newest

Json = Mapping[str, Any]
Document = TypeVar("Document")


class ThisProcess:
    """The documents of this process alone. Who asks for calls looks, so that they are followed."""

    def __init__(
        self, calls: Calls, history: History, caches: CacheView, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is the monotonic one, that prompts are seen by."""
        self._calls = calls
        self._history = history
        self._caches = caches
        self._clock = clock

    async def requests(self, rows: RowFilter) -> RequestList:
        return await in_turns(self.followed_calls().requests(rows))

    async def story(self, request_id: str) -> RequestStory | None:
        return await in_turns(self.followed_calls().story(request_id))

    async def cache(self) -> CacheCounts:
        return await in_turns(self.cache_now())

    async def charts(self) -> ChartCounts:
        return await in_turns(self.charts_now())

    def followed_calls(self) -> Calls:
        """Return the calls; those that come from now on are followed."""
        self._calls.want(self._clock())
        return self._calls

    def cache_now(self) -> Pieces[CacheCounts]:
        return self._caches.counts(self._clock())

    def charts_now(self) -> Pieces[ChartCounts]:
        return self._history.counts()

    @property
    def charts_end(self) -> int:
        """Another number once the charts have changed."""
        return self._history.end


class Made(Generic[Document]):
    """A document that is made again only when what it is made of is something else: the same object is no news."""

    def __init__(self) -> None:
        self._made: tuple[Sequence[object], Document] | None = None

    def of(self, parts: Sequence[object], make: Callable[[], Pieces[Document]]) -> Pieces[Document]:
        """Return the document of these parts: what is the same object is the same."""
        if self._made is not None and all(old is new for old, new in zip(self._made[0], parts, strict=True)):
            return self._made[1]
        document = yield from make()
        self._made = parts, document
        return document


class AllRouters:
    """The documents of all routers. What others said last is remembered for who follows a topic."""

    def __init__(self, here: ThisProcess, others: OtherRouters, clock: Callable[[], float] = time.monotonic) -> None:
        self._here = here
        self._others = others
        self._clock = clock
        self._said = {topic: Said() for topic in PATHS}
        self._limits: Mapping[int, int] = {}  # how many calls a router is asked for, once it has told of some
        self._followed_s = -math.inf  # when others were told last
        self._requests, self._cache, self._charts = Made[RequestList](), Made[CacheState](), Made[Charts]()

    async def keep_following(self) -> None:
        """Somebody looks, at whatever: have all routers follow calls, so that those of now can be told of later."""
        self._here.followed_calls()
        if self._clock() - self._followed_s >= FOLLOW_AGAIN_S:
            self._followed_s = self._clock()
            await self._ask(f"{PATHS['requests']}&limit=1")

    async def requests(self, rows: RowFilter) -> RequestList:
        return await requests_of_all(self._here.followed_calls(), self._others, rows)

    async def story(self, request_id: str) -> RequestStory | None:
        return await story_of_any(self._here.followed_calls(), self._others, request_id)

    async def cache(self) -> CacheState:
        said = await self._ask(PATHS["cache"])
        return await in_turns(self._cache_of(await self._here.cache(), said))

    async def charts(self) -> Charts:
        said = await self._ask(PATHS["charts"])
        return await in_turns(self._charts_of(said))

    # for who follows

    async def ask_others(self, topics: Set[str]) -> None:
        """Hear what others have of these topics now; nothing of those that they were asked for just before."""
        now_s = self._clock()
        for topic in PATHS.keys() - topics:
            self._said[topic] = Said()  # nobody follows it: it would be old when somebody does
        if "requests" not in topics:
            self._limits = {}
        await asyncio.gather(*(self._hear(topic, now_s) for topic in PATHS if topic in topics))

    async def _hear(self, topic: str, now_s: float) -> None:
        said, present = self._said[topic], self._others.ids()
        asked = said.whom(present, now_s)
        if not asked:
            return
        answers = await self._others.ask_each({key: self._path(topic, key) for key in asked})
        said.note(asked, answers, now_s)
        if asked != present:
            return
        said.due_s = now_s + _age_s(topic, said.answers)
        if topic == "requests":
            silent = {key: limit for key, limit in self._limits.items() if key in present - answers.keys()}
            self._limits = {**silent, **await in_turns(self._counted(answers.keys()))}

    def _path(self, topic: str, router_id: int) -> str:
        limit = f"&limit={self._limits.get(router_id, DEFAULT_ROWS)}" if topic == "requests" else ""
        return PATHS[topic] + limit

    def _counted(self, told: Set[int]) -> Pieces[Mapping[int, int]]:
        """Return how many calls those who told are asked for next, by what they have in the list of all."""
        listed = yield from self.requests_now()
        num_rows = Counter(row["router"] for row in listed["rows"].values())
        return {key: _next_limit(self._limits.get(key, DEFAULT_ROWS), num_rows[f"{key:016x}"]) for key in told}

    def requests_now(self) -> Pieces[RequestList]:
        own = yield from self._here.followed_calls().newest()
        said = self._said["requests"].answers
        if not said:
            return own
        return (yield from self._requests.of((own, said), lambda: _merged([own, *map(list_of, said)])))

    def cache_now(self) -> Pieces[CacheState]:
        own = yield from self._here.cache_now()
        said = self._said["cache"].answers
        return (yield from self._cache.of((own, said), lambda: self._cache_of(own, said)))

    def charts_now(self) -> Pieces[Charts]:
        said = self._said["charts"].answers
        return (yield from self._charts.of((self._here.charts_end, said), lambda: self._charts_of(said)))

    async def _ask(self, path: str) -> Sequence[Json]:
        return [*(await self._others.ask(path)).values()]

    def _cache_of(self, own: CacheCounts, said: Sequence[Json]) -> Pieces[CacheState]:
        parts = [cast(CacheCounts, each) for each in said if each.keys() >= CacheCounts.__required_keys__]
        return (yield from cache_of([own, *parts]))

    def _charts_of(self, said: Sequence[Json]) -> Pieces[Charts]:
        parts = [cast(ChartCounts, each) for each in said if each.keys() >= ChartCounts.__required_keys__]
        own = yield from self._here.charts_now()
        return (yield from charts_of([own, *parts]))


def _merged(lists: Sequence[RequestList]) -> Pieces[RequestList]:
    yield
    return merged(lists, ALL.limit)


def _next_limit(limit: int, num_rows: int) -> int:
    """Return how many calls a router is asked for next: half as many again as it has in the list.

    A list that has all that it was asked for may have room for many more of it.
    """
    return DEFAULT_ROWS if num_rows >= limit else min(DEFAULT_ROWS, num_rows + num_rows // 2 + SPARE_ROWS)


def _age_s(topic: str, answers: Sequence[Json]) -> float:
    """Return how old answers may become: those of calls by the processor time that it took all to tell, about."""
    if topic != "requests":
        return AGE_S[topic]
    return max(AGE_S[topic], sum(ANSWER_S + ROW_S * len(each.get("rows", ())) for each in answers) / ASKING_SHARE)
