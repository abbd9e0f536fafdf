"""What a declaration waits for, and what it does not: weights of pools hold at once, adapters are loaded in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from diptych.common.errors import Unavailable
from diptych.common.members.record import State
from diptych.router.choose.pools import Weights
from diptych.router.workers.known_worker import KnownWorker
from diptych.router.workers.reconciler import FAILED_EVERY_S, Reconciler
from diptych.v1.bootstrap_pb2 import Instance

PATIENCE_S = 100.0


class Platform:
    """A worker that has adapters, and who loads them there: `going` is asked before each."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.calls: list[str] = []
        self.pools: Weights = {}
        self.expected: frozenset[str] = frozenset()
        self.failing: set[str] = set()
        self.going = asyncio.Event()
        self.going.set()
        self.has_begun = asyncio.Event()

    def own_workers(self) -> Iterable[KnownWorker]:
        worker: Any = SimpleNamespace(state=State.READY, adapters=dict(self.loaded))
        return [worker]

    def declare(self, pools: Weights) -> None:
        self.pools = pools

    def expect(self, adapters: frozenset[str]) -> None:
        self.expected = adapters

    def routers(self) -> Mapping[int, Instance]:
        return {}

    async def load(self, name: str, path: str) -> int:
        self.calls.append(f"load {name} {path}")
        self.has_begun.set()
        await self.going.wait()
        if path in self.failing:
            raise Unavailable(f"{path} is no folder")
        self.loaded[name] = path
        return 1

    async def unload(self, name: str) -> int:
        self.calls.append(f"unload {name}")
        if self.loaded.pop(name, None) is None:
            raise Unavailable("nobody has it")
        return 1


def play(scene: Callable[[Platform, Reconciler, list[float]], Coroutine[Any, Any, None]]) -> None:
    """`scene(platform, reconciler, now_s)`."""

    async def all_of_it() -> None:
        platform, now_s = Platform(), [0.0]
        reconciler = Reconciler(platform, platform, None, lambda: now_s[0])
        async with asyncio.timeout(PATIENCE_S):
            await scene(platform, reconciler, now_s)

    asyncio.run(all_of_it())


def test_weights_of_pools_hold_while_an_adapter_is_still_loaded() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, _: list[float]) -> None:
        platform.going.clear()
        adapters = '[adapters]\nsql = "/a"'
        loading = asyncio.create_task(reconciler.replace(adapters))
        await platform.has_begun.wait()
        changed = await reconciler.replace(f"[pools]\nnext = 0\nold = 1\n{adapters}")
        assert changed == ["pool next: weight 0", "pool old: weight 1"]
        assert (platform.pools, loading.done()) == ({"next": 0.0, "old": 1.0}, False)
        platform.going.set()
        await loading
        assert platform.loaded == {"sql": "/a"}

    play(scene)


def test_the_loop_takes_weights_while_it_loads_an_adapter() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, _: list[float]) -> None:
        platform.going.clear()
        running = asyncio.create_task(reconciler.run())
        declaring = asyncio.create_task(reconciler.replace('[adapters]\nsql = "/a"'))
        await platform.has_begun.wait()
        await reconciler.replace('[pools]\nnext = 5\n[adapters]\nsql = "/a"')
        assert platform.pools == {"next": 5.0}
        for task in (running, declaring):
            task.cancel()
        await asyncio.gather(running, declaring, return_exceptions=True)

    play(scene)


def test_each_adapter_is_loaded_as_it_is_declared_by_then() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, _: list[float]) -> None:
        platform.going.clear()
        first = asyncio.create_task(reconciler.replace('[adapters]\na = "/1"\nb = "/1"\nc = "/1"'))
        await platform.has_begun.wait()
        second = asyncio.create_task(reconciler.replace('[adapters]\na = "/2"\nc = "/3"'))
        await asyncio.sleep(0)
        platform.going.set()
        await asyncio.gather(first, second)
        assert platform.loaded == {"a": "/2", "c": "/3"}
        assert [call for call in platform.calls if call.startswith("load")] == ["load a /1", "load c /3", "load a /2"]

    play(scene)


def test_a_failure_of_a_path_that_is_no_longer_declared_does_not_hold_up_the_new_one() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, _: list[float]) -> None:
        platform.going.clear()
        platform.failing = {"/1"}
        first = asyncio.create_task(reconciler.replace('[adapters]\na = "/1"'))
        await platform.has_begun.wait()
        second = asyncio.create_task(reconciler.replace('[adapters]\na = "/2"'))
        await asyncio.sleep(0)
        platform.going.set()
        await first
        await second
        assert "a" not in reconciler.problems

    play(scene)


def test_a_problem_is_over_when_somebody_else_has_loaded_the_adapter() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, now_s: list[float]) -> None:
        platform.failing = {"/1"}
        await reconciler.replace('[adapters]\na = "/1"')
        assert reconciler.problems == {"a": "/1 is no folder"}
        assert platform.expected == frozenset()
        platform.loaded["a"] = "/1"
        now_s[0] += 2 * FAILED_EVERY_S
        await reconciler.replace('[adapters]\na = "/1"')
        assert not reconciler.problems
        assert platform.expected == {"a"}

    play(scene)


def test_a_change_of_weights_leaves_problems_of_adapters_as_they_are() -> None:
    async def scene(platform: Platform, reconciler: Reconciler, _: list[float]) -> None:
        platform.failing = {"/1"}
        await reconciler.replace('[adapters]\na = "/1"')
        await reconciler.replace('[pools]\nnext = 1\n[adapters]\na = "/1"')
        assert reconciler.problems == {"a": "/1 is no folder"}

    play(scene)
