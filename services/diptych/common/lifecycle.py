"""Ends a process with its parent, or on SIGTERM or SIGINT, and never later than its grace period.

It also keeps Python's search for cyclic garbage from visiting all objects of a server hundreds of times a second.
Reference counts free what a request leaves; the search is for the few cycles, most of which come from exceptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NoReturn, TypeVar

from diptych.common.members.heartbeat import beat_for_supervisor

T = TypeVar("T")

PARENT_PID_VARIABLE: Final = "DIPTYCH_PARENT_PID"  # set by a supervisor: the process to die with

GARBAGE_EVERY: Final = 20_000  # objects more than before: a few MB at most; Python's own choice is 700
GARBAGE_THEN: Final = 20  # searches among younger objects for each among older ones
_PR_SET_PDEATHSIG: Final = 1
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def die_with_parent(signal_number: signal.Signals = signal.SIGTERM, *, parent_pid: int | None = None) -> None:
    """Ask the kernel to send `signal_number` to this process when its parent ends; does nothing but on Linux.

    The kernel means the thread that started this process: start children from a thread that stays, such as the main
    one. With `parent_pid` a parent that is already gone is noticed too, and this process exits at once.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise SystemExit(128 + signal_number)


def die_with_supervisor() -> None:
    """`die_with_parent`, if the parent asked for it by `DIPTYCH_PARENT_PID`; a process started by hand lives on."""
    parent_pid = os.environ.pop(PARENT_PID_VARIABLE, "")
    if parent_pid:
        die_with_parent(parent_pid=int(parent_pid))


def end_on_sigterm() -> None:
    """As the first process of a container end at SIGTERM, while nothing else handles it yet.

    Linux does nothing to such a process where others would end. One told to end while it still imports would go on,
    serve, and be killed after its grace period with all that it holds.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's own clean-up, which takes most of a second once torch is loaded.

    Whatever others can see must have been closed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # where they go to is full, or gone
            stream.flush()
    os._exit(code)


class Stop(asyncio.Event):
    """Set when the process shall end. `hurry` is set when it shall not wait for what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = asyncio.Event()


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


@contextlib.contextmanager
def garbage_postponed() -> Iterator[None]:
    """Do not search while modules are imported: what they make stays, and searches would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_what_stays() -> None:
    """Call it when all is loaded: what is there now is never searched again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY, GARBAGE_THEN, GARBAGE_THEN)
