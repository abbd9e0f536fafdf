"""Documents of several routers: counts add up, calls are one list, and who answers nonsense is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from typing import Any, cast

import pytest

from diptych.router.console.cache.cache_state import CacheView
from diptych.router.console.calls.calls import Calls
from diptych.router.console.calls.request_rows import ALL, RowFilter
from diptych.router.console.documents import (
    AGE_S,
    ANSWER_S,
    ASKING_SHARE,
    FOLLOW_AGAIN_S,
    PATHS,
    ROW_S,
    SPARE_ROWS,
    AllRouters,
    ThisProcess,
)
from diptych.router.console.history import History
from diptych.router.console.other_routers import OtherRouters
from diptych.router.console.pieces import Pieces, at_once

CACHE: Mapping[str, Any] = {
    "window_s": 60.0, "prompt_tokens": 100, "cached_tokens": 50, "seen": None, "tiers": {}, "prefixes": {}
}  # fmt: skip
ROW: Mapping[str, Any] = {
    "router": "7", "phase": "ended", "outcome": "ok", "status": 200, "path": "/generate", "tenant": "", "model": "m",
    "adapter": "", "duration_s": 1.0, "ttft_s": 0.1, "prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 4,
    "num_attempts": 1, "prefill": "1", "decode": "2",
}  # fmt: skip


def row(request_id: str, arrived_unix_s: float) -> dict[str, Any]:
    return {**ROW, "id": request_id, "arrived_unix_s": arrived_unix_s}


class Here:
    """What this process has: a call, and counts."""

    def __init__(self) -> None:
        self.wanted_s: list[float] = []
        self.listed = at_once(self.requests(ALL))
        self.told = CACHE

    def want(self, now_s: float) -> None:
        self.wanted_s.append(now_s)

    def requests(self, rows: RowFilter) -> Pieces[dict[str, Any]]:
        yield
        return {"rows": {"mine": row("mine", 1.0)}}

    def story(self, request_id: str) -> Pieces[dict[str, Any] | None]:
        yield
        return {"row": row("mine", 1.0)} if request_id == "mine" else None

    def newest(self) -> Pieces[dict[str, Any]]:
        yield
        return self.listed

    def counts(self, now_s: float) -> Pieces[Mapping[str, Any]]:
        yield
        return self.told


class Others:
    """Two other routers, of which one is of another version."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.asked_each: list[tuple[str, str]] = []
        self.said: Mapping[int, Any] = {}  # of their calls, where a test wants others

    def ids(self) -> Set[int]:
        return {8, 9}

    async def ask_each(self, paths: Mapping[int, str]) -> Mapping[int, Any]:
        if PATHS["requests"] in paths[8]:
            self.asked_each.append((paths[8], paths[9]))
        return self.said or await self.ask(paths[8])

    async def ask(self, path_and_query: str) -> Mapping[int, Any]:
        self.asked.append(path_and_query)
        if "requests/" in path_and_query:
            story = dict.fromkeys(("row", "bars", "unnamed_s", "token_s", "explanation", "trace_id"))
            return {8: {**story, "row": row("theirs", 2.0)}, 9: {"nonsense": 1}}
        if "requests" in path_and_query:
            return {8: {"rows": {"theirs": row("theirs", 2.0)}}, 9: {"rows": {"bad": {"id": "bad"}}}}
        return {8: CACHE, 9: {"nonsense": 1}}


class Scene:
    """All of them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.here, self.others = Here(), Others()
        here = ThisProcess(
            cast(Calls, self.here), cast(History, self.here), cast(CacheView, self.here), lambda: self.now_s
        )
        self.all = AllRouters(here, cast(OtherRouters, self.others), lambda: self.now_s)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_calls_of_all_routers_are_one_list_the_newest_first(scene: Scene) -> None:
    found = asyncio.run(scene.all.requests(ALL))
    assert [*found["rows"]] == ["theirs", "mine"]
    assert scene.here.wanted_s == [100.0]


def test_a_call_is_found_wherever_it_was_served(scene: Scene) -> None:
    for request_id in ("mine", "theirs"):
        story = asyncio.run(scene.all.story(request_id))
        assert story is not None
        assert story["row"]["id"] == request_id
    assert len(scene.others.asked) == 1


def test_counts_of_all_routers_add_up(scene: Scene) -> None:
    state = asyncio.run(scene.all.cache())
    assert (state["prompt_tokens"], state["cached_tokens"], state["hit_rate"]) == (200, 100, 0.5)


def test_who_follows_is_told_what_others_said_last(scene: Scene) -> None:
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 100
    assert [*at_once(scene.all.requests_now())["rows"]] == ["mine"]
    asyncio.run(scene.all.ask_others({"cache", "requests", "fleet", "steps"}))
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 200
    assert [*at_once(scene.all.requests_now())["rows"]] == ["theirs", "mine"]
    assert sorted(scene.others.asked) == [PATHS["cache"], f"{PATHS['requests']}&limit=200"]


def test_a_document_is_made_again_only_when_what_it_is_made_of_is_another(scene: Scene) -> None:
    for now in (scene.all.requests_now, scene.all.cache_now):
        assert at_once(now()) is at_once(now())
    asyncio.run(scene.all.ask_others({"cache", "requests"}))
    for now in (scene.all.requests_now, scene.all.cache_now):
        assert at_once(now()) is at_once(now())
    before = at_once(scene.all.cache_now())
    scene.here.told = {**CACHE, "prompt_tokens": 300}
    assert (at_once(scene.all.cache_now())["prompt_tokens"], before["prompt_tokens"]) == (400, 200)


def test_others_are_asked_no_more_often_than_what_they_say_changes(scene: Scene) -> None:
    for _ in range(2):
        asyncio.run(scene.all.ask_others({"cache"}))
    assert scene.others.asked == [PATHS["cache"]]
    scene.now_s += AGE_S["cache"]
    asyncio.run(scene.all.ask_others({"cache"}))
    assert scene.others.asked == [PATHS["cache"]] * 2


def test_what_nobody_follows_any_more_is_forgotten(scene: Scene) -> None:
    asyncio.run(scene.all.ask_others({"cache"}))
    asyncio.run(scene.all.ask_others({"requests"}))
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 100
    asyncio.run(scene.all.ask_others({"cache"}))
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 200


def test_who_looks_at_anything_has_all_routers_follow_calls_and_others_are_told_once_a_minute(scene: Scene) -> None:
    for later_s in (0.0, 1.0, FOLLOW_AGAIN_S):
        scene.now_s = 100.0 + later_s
        asyncio.run(scene.all.keep_following())
    assert scene.here.wanted_s == [100.0, 101.0, 100.0 + FOLLOW_AGAIN_S]
    assert scene.others.asked == [f"{PATHS['requests']}&limit=1"] * 2


def test_a_router_is_asked_for_the_calls_that_the_list_has_room_for_and_for_some_more(scene: Scene) -> None:
    newest = {f"n{number}": {**row(f"n{number}", 10.0 + number), "router": f"{8:016x}"} for number in range(199)}
    scene.others.said = {8: {"rows": newest}, 9: {"rows": {}}}
    for _ in range(2):
        asyncio.run(scene.all.ask_others({"requests"}))
        scene.now_s += 60.0
    scene.others.said = {}
    asyncio.run(scene.all.ask_others({"requests"}))
    wanted = [tuple(int(path.rpartition("=")[2]) for path in paths) for paths in scene.others.asked_each]
    assert wanted == [(200, 200), (200, SPARE_ROWS), (200, SPARE_ROWS)]
    asyncio.run(scene.all.ask_others({"cache"}))  # nobody follows calls any more
    asyncio.run(scene.all.ask_others({"requests"}))
    assert scene.others.asked_each[-1][0].endswith("limit=200")


class Busy:
    """Eight other routers, each with as many calls as it has had turns: the newest of all are spread evenly."""

    def __init__(self) -> None:
        self.present = {*range(1, 9)}
        self.silent: set[int] = set()  # who does not answer now
        self.idle: set[int] = set()  # who has no calls yet
        self.now_s = 0.0
        self.asked: list[Mapping[int, str]] = []

    def ids(self) -> Set[int]:
        return self.present

    async def ask_each(self, paths: Mapping[int, str]) -> Mapping[int, Any]:
        self.asked.append(paths)
        return {key: self._answer(key, path) for key, path in paths.items() if key not in self.silent}

    def _answer(self, key: int, path: str) -> Mapping[str, Any]:
        if PATHS["requests"] not in path:
            return CACHE
        num_rows = 0 if key in self.idle else int(path.rpartition("=")[2])
        name = f"{key:016x}"
        rows = [row(f"{name}-{self.now_s}-{i}", 100 + self.now_s - i / 50) for i in range(num_rows)]
        return {"rows": {each["id"]: {**each, "router": name} for each in rows}}


class BusyScene:
    """A quiet process that follows eight busy ones, each second."""

    def __init__(self, topic: str) -> None:
        self.others, self._topic = Busy(), topic
        here = Here()
        own = ThisProcess(cast(Calls, here), cast(History, here), cast(CacheView, here), lambda: self.others.now_s)
        self.all = AllRouters(own, cast(OtherRouters, self.others), lambda: self.others.now_s)

    def follow(self, num_s: int) -> None:
        for _ in range(num_s):
            asyncio.run(self.all.ask_others({self._topic}))
            self.others.now_s += 1.0

    def until_all_are_asked(self) -> None:
        num_before = len(self.others.asked)
        while not any(paths.keys() == self.others.present for paths in self.others.asked[num_before:]):
            self.follow(1)

    def num_rows(self, key: int) -> int:
        return [row["router"] for row in at_once(self.all.requests_now())["rows"].values()].count(f"{key:016x}")


@pytest.fixture
def calls() -> BusyScene:
    """Eight busy processes, of which it is known how many calls each has in the list."""
    scene = BusyScene("requests")
    for _ in range(2):
        scene.until_all_are_asked()
    assert [scene.num_rows(key) for key in scene.others.ids()] == [25] * 8
    return scene


def limits(paths: Mapping[int, str]) -> dict[int, int]:
    return {key: int(path.rpartition("=")[2]) for key, path in paths.items()}


def test_calls_of_who_is_silent_once_stay_and_it_is_asked_for_as_many_again_soon(calls: BusyScene) -> None:
    calls.others.silent, calls.others.idle = {3}, {*range(1, 9)} - {3}
    calls.until_all_are_asked()
    assert calls.num_rows(3) == 25 + 12 + SPARE_ROWS  # all that it said before
    calls.others.silent = set()
    calls.follow(1)
    assert limits(calls.others.asked[-1]) == {3: 25 + 12 + SPARE_ROWS}
    calls.others.idle = set()
    calls.until_all_are_asked()
    assert limits(calls.others.asked[-1])[3] == 25 + 12 + SPARE_ROWS


def test_calls_of_who_is_silent_twice_are_gone_until_it_answers_and_it_is_asked_for_as_many(calls: BusyScene) -> None:
    calls.others.silent = {3}
    calls.until_all_are_asked()
    calls.follow(1)
    assert calls.num_rows(3) == 0
    calls.others.silent = set()
    calls.follow(2)
    assert limits(calls.others.asked[-1]) == {3: 25 + 12 + SPARE_ROWS}
    assert calls.num_rows(3) == 25 + 12 + SPARE_ROWS  # newer than those of all others


def test_who_becomes_busy_is_listed_whole_once_the_list_had_all_it_was_asked_for(calls: BusyScene) -> None:
    calls.others.idle = {3}
    for _ in range(2):
        calls.until_all_are_asked()
    assert limits(calls.others.asked[-1])[3] == SPARE_ROWS
    calls.others.idle = set()
    calls.until_all_are_asked()
    assert calls.num_rows(3) == SPARE_ROWS
    calls.until_all_are_asked()
    assert (limits(calls.others.asked[-1])[3], calls.num_rows(3)) == (200, 25)


def test_counts_of_who_is_silent_once_stay_and_it_is_asked_again_a_second_later() -> None:
    scene = BusyScene("cache")
    scene.follow(int(AGE_S["cache"]))
    scene.others.silent = {3}
    scene.follow(1)
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 900
    scene.follow(1)
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 800
    assert [set(paths) for paths in scene.others.asked] == [{*range(1, 9)}, {*range(1, 9)}, {3}]
    scene.others.silent = set()
    scene.follow(2)
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 900
    assert len(scene.others.asked) == 4


def test_counts_of_who_has_gone_are_not_kept() -> None:
    scene = BusyScene("cache")
    scene.follow(1)
    scene.others.present.remove(3)
    scene.follow(1)
    assert at_once(scene.all.cache_now())["prompt_tokens"] == 800


def test_the_more_others_tell_of_calls_the_less_often_they_are_asked(scene: Scene) -> None:
    def asked_again_after_s(num_rows: int) -> float:
        scene.others.said = {8: {"rows": {f"{i}": row(f"{i}", float(i)) for i in range(num_rows)}}}
        scene.now_s += 1000.0
        asyncio.run(scene.all.ask_others({"requests"}))
        begun_s, num_asked = scene.now_s, len(scene.others.asked_each)
        while len(scene.others.asked_each) == num_asked:
            scene.now_s += 0.1
            asyncio.run(scene.all.ask_others({"requests"}))
        return scene.now_s - begun_s

    assert asked_again_after_s(0) == pytest.approx(AGE_S["requests"], abs=0.2)
    assert asked_again_after_s(200) == pytest.approx((ANSWER_S + 200 * ROW_S) / ASKING_SHARE, abs=0.2)
