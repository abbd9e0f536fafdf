"""Ends a process with its parent, at once, or on SIGTERM before it serves; `event_loop` ends one that serves.

And says where a process was that crashed, or that does not end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Final, NoReturn

PARENT_PID_VARIABLE: Final = "DIPTYCH_PARENT_PID"  # set by a supervisor: the process to die with

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(signal_number: signal.Signals = signal.SIGTERM, *, parent_pid: int | None = None) -> None:
    """Ask the kernel to send `signal_number` to this process when its parent ends; does nothing but on Linux.

    The kernel means the thread that started this process: start children from a thread that stays, such as the main
    one. With `parent_pid` a parent that is already gone is noticed too, and this process exits at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # most commands have no such parent

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


@contextlib.contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` within the block, so that what it holds is given back. Elsewhere than in the main
    thread, which alone hears signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_stacks() -> None:
    """Write the stacks of all threads to stderr when this process crashes, and when it gets SIGUSR2.

    That is done in the signal's handler itself, so also where a thread waits for a lock or a GPU for ever.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's own clean-up, which takes most of a second once torch is loaded.

    Whatever others can see must have been closed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # where they go to is full, or gone
            stream.flush()
    os._exit(code)
