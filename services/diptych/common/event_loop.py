"""Runs what serves on an event loop until SIGTERM or SIGINT, and never longer than its grace period from then on.

Heartbeats show that the loop comes round: `beat_for_supervisor` to another process, `LoopHeartbeat` to other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final, TypeVar

from diptych.common.errors import DiptychError
from diptych.common.members.heartbeat import BEAT_S, DESCRIPTOR_VARIABLE, NO_BEAT, SharedHeartbeat

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Stop(asyncio.Event):
    """Set when the process shall end. `hurry` is set when it shall not wait for what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = asyncio.Event()


async def in_turns(items: Iterable[T]) -> AsyncGenerator[T, None]:
    """Yield the items; after each one it is the turn of others: many that are short are long together."""
    for item in items:
        yield item
        await asyncio.sleep(0)


async def run_until_signal(serve: Callable[[Stop], Awaitable[T]], *, grace_s: int = 30) -> T:
    """Run `serve(stop)`. SIGTERM or SIGINT sets `stop`, a second one `stop.hurry`; a third cancels `serve`.

    From the first signal on the process has `grace_s` to end: then SIGALRM kills it, even if the loop is blocked.
    Must run in the main thread.
    """
    loop = asyncio.get_running_loop()
    stop = Stop()
    beating = asyncio.ensure_future(beat_for_supervisor())
    task = asyncio.ensure_future(serve(stop))

    def on_signal() -> None:
        if stop.hurry.is_set():
            task.cancel()
        elif stop.is_set():
            stop.hurry.set()
        else:
            stop.set()
            signal.alarm(grace_s)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    finally:
        beating.cancel()
        signal.alarm(0)
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def repeat(act: Callable[[], None], every_s: float, stop: asyncio.Event) -> None:
    """Call `act` on another thread, and again `every_s` after it has ended, until `stop` is set.

    What goes wrong outside is told, and tried again.
    """
    while not stop.is_set():
        try:
            await asyncio.to_thread(act)
        except DiptychError as error:
            logger.warning("%s; trying again", error)
        await wait_or_timeout(stop, every_s)


async def beat_for_supervisor() -> None:
    """Show whoever started this process, and asked for it, that the event loop comes round; until cancelled.

    It begins once the loop has come round, however long the first step of others takes, and says when it ends.
    """
    descriptor = os.environ.pop(DESCRIPTOR_VARIABLE, "")
    if not descriptor:
        return
    heartbeat = SharedHeartbeat(int(descriptor))
    os.close(int(descriptor))
    await asyncio.sleep(0)
    try:
        while True:
            heartbeat.beat(time.monotonic())
            await asyncio.sleep(BEAT_S)
    finally:
        heartbeat.beat(NO_BEAT)


class LoopHeartbeat:
    """The heartbeat of an asyncio loop, on which `run` must be running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last_s = clock()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.last_s = self._clock()
            await asyncio.sleep(BEAT_S)


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if the running task was cancelled before.

    For loops that go on after a gRPC call has failed: a call that is cancelled just as it ends raises its own error.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def wait_or_timeout(event: asyncio.Event, timeout_s: float) -> bool:
    """Return True as soon as `event` is set, False after `timeout_s` seconds.

    Not by `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes together with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
