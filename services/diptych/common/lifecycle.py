"""How a process ends: with its parent, or on SIGTERM or SIGINT, and never later than its grace period."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

PARENT_PID_VARIABLE: Final = "DIPTYCH_PARENT_PID"  # set by a supervisor: the process to die with

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


async def run_until_signal(serve: Callable[[asyncio.Event], Awaitable[T]], *, grace_s: int = 30) -> T:
    """Run `serve(stop)`. SIGTERM or SIGINT sets `stop`; a second one cancels `serve`.

    From the first signal on the process has `grace_s` to end: then SIGALRM kills it, even if the loop is blocked.
    Must run in the main thread.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(stop))

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()
        signal.alarm(grace_s)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    finally:
        signal.alarm(0)
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def wait_or_timeout(event: asyncio.Event, timeout_s: float) -> bool:
    """Return True as soon as `event` is set, False after `timeout_s` seconds.

    Not by `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes together with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
