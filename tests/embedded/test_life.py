"""How the thread of an engine ends, and what becomes of who waits for it: no processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import pytest

from diptych.common.errors import InternalError
from diptych.embedded.life import Life

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy


@pytest.fixture
def life() -> Iterator[Life]:
    life = Life("test")
    yield life
    life.end()


async def number() -> int:
    return 7


async def nothing() -> None:
    pass


def under_way(life: Life) -> Future[None]:
    """Return work that runs, and never ends by itself."""
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    future = life.submit(work())
    assert begun.wait(TIMEOUT_S)
    return future


def test_work_is_done_in_the_thread(life: Life) -> None:
    assert life.wait(number()) == 7


def test_what_is_under_way_ends_with_a_clear_error_before_what_takes_time(life: Life) -> None:
    may_go_on = threading.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        yield
        assert await asyncio.to_thread(may_go_on.wait, TIMEOUT_S)

    life.wait(life.stack.enter_async_context(slow()))
    future = under_way(life)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(life.end)
        with pytest.raises(InternalError, match="the engine was closed"):
            future.result(TIMEOUT_S)
        assert not closing.done()
        may_go_on.set()
        closing.result(TIMEOUT_S)


def test_whoever_comes_later_is_told(life: Life) -> None:
    life.end()
    with pytest.raises(InternalError, match="the engine was closed"):
        life.wait(number())


def test_all_that_end_it_at_once_return_when_it_has_ended(life: Life) -> None:
    num_closed = 0

    @asynccontextmanager
    async def counted() -> AsyncIterator[None]:
        nonlocal num_closed
        yield
        await asyncio.sleep(0.01)
        num_closed += 1

    life.wait(life.stack.enter_async_context(counted()))
    together = threading.Barrier(8)

    def end() -> int:
        together.wait(TIMEOUT_S)
        life.end()
        return num_closed

    with ThreadPoolExecutor(8) as threads:
        assert [each.result(TIMEOUT_S) for each in [threads.submit(end) for _ in range(8)]] == [1] * 8


def test_of_work_that_comes_while_it_ends_none_is_forgotten() -> None:
    for _ in range(20):
        life = Life("test")

        def ask_again_and_again(life: Life = life) -> None:
            while True:
                life.submit(number()).result(TIMEOUT_S)

        def ask(ask_again_and_again: Callable[[], None] = ask_again_and_again) -> None:
            with pytest.raises(InternalError, match="the engine was closed"):
                ask_again_and_again()

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            life.wait(number())
            life.end()
            for each in asking:
                each.result(TIMEOUT_S)


def test_work_may_clean_up_when_it_ends_and_fail_in_that(life: Life) -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()
            raise ValueError("in vain")

    future = life.submit(work())
    assert begun.wait(TIMEOUT_S)
    life.end()
    assert cleaned.is_set()
    with pytest.raises(ValueError, match="in vain"):
        future.result(0)


def test_a_generator_that_was_never_exhausted_is_closed(life: Life) -> None:
    cleaned = threading.Event()

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            cleaned.set()

    generator = numbers()

    async def first() -> int:
        return await anext(generator)

    assert life.wait(first()) == 1
    life.end()
    assert cleaned.is_set()


def test_what_goes_wrong_at_the_end_is_told_and_the_thread_has_ended(life: Life) -> None:
    def fail() -> None:
        raise ValueError("it can't be closed")

    life.stack.callback(fail)
    with pytest.raises(ValueError, match="it can't be closed"):
        life.end()
    life.end()
    with pytest.raises(InternalError, match="the engine was closed"):
        life.submit(number())


def test_work_that_nobody_may_wait_for_is_not_waited_for(life: Life) -> None:
    """A garbage collector may run in the thread itself: who waits there for what is to be done there waits for ever."""
    done = threading.Event()

    class Left:
        """What has work left to do when it is collected."""

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            life.finish(self.work())

        @staticmethod
        async def work() -> None:
            done.set()

    async def collect() -> None:
        gc.collect()

    Left()
    life.submit(collect()).result(TIMEOUT_S)
    assert done.wait(TIMEOUT_S)


def test_it_may_be_ended_in_its_own_thread(life: Life) -> None:
    async def end() -> None:
        life.end()
        await asyncio.Event().wait()

    with pytest.raises(InternalError, match="the engine was closed"):
        life.submit(end()).result(TIMEOUT_S)
    life.end()


def test_what_is_to_be_finished_is_waited_for_and_dropped_when_it_has_ended(life: Life) -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    life.finish(work())
    assert done == [1]
    life.end()
    life.finish(work())
    assert done == [1]


def interrupted_by(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted_soon(begun: threading.Event) -> Iterator[None]:
    """Have the main thread interrupted, as by Ctrl-C, once something has begun that it waits for."""

    def is_waiting() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code is threading.Condition.wait.__code__

    def interrupt() -> None:
        assert begun.wait(TIMEOUT_S)
        while not is_waiting():
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupted_by)
    interrupter = threading.Thread(target=interrupt)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


def test_work_whose_waiter_is_interrupted_is_cancelled(life: Life) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with interrupted_soon(begun):
        life.wait(work())
    assert cancelled.wait(TIMEOUT_S)
    assert life.wait(number()) == 7


def test_a_stream_whose_reader_is_interrupted_is_closed_and_the_interrupt_is_what_is_told(life: Life) -> None:
    begun, closed = threading.Event(), threading.Event()

    async def parts() -> AsyncGenerator[int, None]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            closed.set()

    async def first(parts: AsyncGenerator[int, None]) -> int:
        return await anext(parts)

    stream = parts()
    with interrupted_soon(begun):
        try:
            life.wait(first(stream))
        finally:
            life.finish(stream.aclose())
    assert closed.is_set()


def test_a_forked_process_has_no_part_in_it_and_ends(life: Life) -> None:
    """Threads are not forked: it would wait for ever for this one."""
    pid = os.fork()
    if not pid:
        signal.alarm(round(TIMEOUT_S))
        try:
            with pytest.raises(InternalError, match="another process"):
                life.wait(number())
            life.finish(nothing())
            assert not life.begin_to_end()
            life.end()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert life.wait(number()) == 7
