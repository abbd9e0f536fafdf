"""Whose long work is done next, and what becomes of work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from diptych.router.text.fair_threads import FairThreadPool

PATIENCE_S = 200


class Work:
    """Pieces of work that note when they began, and wait to be let go on."""

    def __init__(self, num_threads: int) -> None:
        self.threads = FairThreadPool(num_threads, "test")
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)

    def start(self, tenant: str, num_steps: int = 10) -> asyncio.Task[str]:
        def work() -> str:
            self.begun.append(tenant)
            self._has_begun.release()
            assert self._may_end.acquire(timeout=PATIENCE_S)
            return tenant

        return asyncio.create_task(self.threads.run(work, tenant, num_steps))

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self._has_begun.acquire, timeout=PATIENCE_S)

    async def step(self) -> None:
        """Let a piece of work end, and wait for the next one to begin."""
        self.let_end()
        await self.until_begun()

    def let_end(self, count: int = 1) -> None:
        self._may_end.release(count)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work(1)
    yield work
    work.let_end(1000)
    work.threads.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE_S)

    asyncio.run(bounded())


def test_a_newcomer_waits_for_one_piece_of_a_flood(work: Work) -> None:
    async def test() -> None:
        tasks = [work.start("flood") for _ in range(50)]
        await work.until_begun()
        tasks += [work.start("bob"), work.start("bob")]
        await asyncio.sleep(0)
        for _ in range(4):
            await work.step()
        assert work.begun == ["flood", "flood", "bob", "flood", "bob"]
        work.let_end(len(tasks))
        await asyncio.gather(*tasks)

    run(test)


def test_turns_are_by_steps(work: Work) -> None:
    async def test() -> None:
        tasks = [work.start("first")]
        await work.until_begun()
        tasks += [work.start("long", 30) for _ in range(3)] + [work.start("short", 10) for _ in range(9)]
        await asyncio.sleep(0)
        for _ in range(8):
            await work.step()
        assert work.begun[1:] == ["long", "short", "short", "short", "long", "short", "short", "short"]
        work.let_end(len(tasks))
        await asyncio.gather(*tasks)

    run(test)


def test_work_of_a_client_that_left_is_never_done(work: Work) -> None:
    async def test() -> None:
        running = work.start("flood")
        await work.until_begun()
        waiting = [work.start("flood") for _ in range(20)]
        await asyncio.sleep(0)
        assert work.threads.num_waiting == 20
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert work.threads.num_waiting == 0
        bob = work.start("bob")
        work.let_end(2)
        assert await running == "flood"
        assert await bob == "bob"
        assert work.begun == ["flood", "bob"]

    run(test)


def test_a_thread_whose_client_left_is_busy_until_its_work_ends(work: Work) -> None:
    async def test() -> None:
        running = work.start("flood")
        await work.until_begun()
        running.cancel()
        await asyncio.wait([running])
        bob = work.start("bob")
        await asyncio.sleep(0)
        assert work.threads.num_waiting == 1
        work.let_end(2)
        assert await bob == "bob"

    run(test)


@pytest.mark.parametrize("leaves_late", [False, True])
def test_who_leaves_as_its_turn_comes_passes_it_on(work: Work, leaves_late: bool) -> None:
    async def test() -> None:
        running = work.start("a")
        await work.until_begun()
        leaving, staying = work.start("b"), work.start("c")
        await asyncio.sleep(0)
        if leaves_late:
            work.threads._pass_on()  # as when `running` ends: in the same step of the loop
            leaving.cancel()
        else:
            leaving.cancel()
            work.threads._pass_on()
        await asyncio.wait([leaving])
        work.let_end(2)
        assert list(await asyncio.gather(running, staying)) == ["a", "c"]
        assert (work.begun, work.threads.num_waiting) == (["a", "c"], 0)

    run(test)


def test_all_threads_serve_one_tenant_that_is_alone() -> None:
    work = Work(3)

    async def test() -> None:
        tasks = [work.start("alone") for _ in range(5)]
        for _ in range(3):
            await work.until_begun()
        assert (len(work.begun), work.threads.num_waiting) == (3, 2)
        work.let_end(5)
        await asyncio.gather(*tasks)

    run(test)
    work.threads.close()
