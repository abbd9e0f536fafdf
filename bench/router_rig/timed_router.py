"""A router that tells how long each piece of work keeps its event loop, by what the piece belongs to.

    python -m router_rig.timed_router OUT.json router --insecure ...

A piece is one callback of the loop, or one step of a task: nothing else is served meanwhile. Times are processor time
of the loop's thread, so what else runs on the machine is not counted. At SIGUSR2 the pieces since the last signal are
written to the file. Rule: the router is the product's own, but for its loop, which is asyncio's: that of uvloop can't
be looked into.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop

from diptych.cli.main import main

LONG_S: Final = 1e-4  # of shorter ones only the sum is kept
CONSOLE: Final = ("/router/console/", "/router/http/console/")
OTHERS: Final = "others"  # requests, membership, gRPC


@dataclass(slots=True)
class Kind:
    """Pieces that belong to one thing. Times in seconds."""

    num_pieces: int = 0
    sum_s: float = 0.0
    long_s: list[float] = field(default_factory=list)  # those that were longer than `LONG_S`

    def add(self, took_s: float) -> None:
        self.num_pieces += 1
        self.sum_s += took_s
        if took_s >= LONG_S:
            self.long_s.append(took_s)


@dataclass(slots=True)
class Pieces:
    """What kept a loop."""

    kinds: dict[str, Kind] = field(default_factory=dict)  # by what they belong to
    turns: Kind = field(default_factory=Kind)  # of the loop: all that is ready, one after the other
    garbage: Kind = field(default_factory=Kind)  # searches for it, which are parts of pieces


class Clock:
    """Times the pieces of one loop."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pieces = Pieces()
        self._garbage_began_s = 0.0
        gc.callbacks.append(self._note_garbage)

    def run(self, handle: asyncio.Handle, run: Callable[[asyncio.Handle], None]) -> None:
        callback = handle._callback  # type: ignore[attr-defined]  # a handle that has run forgets it
        began_s = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began_s
        self._pieces.kinds.setdefault(_name(callback), Kind()).add(took_s)

    def turn(self, loop: asyncio.BaseEventLoop, run_once: Callable[[asyncio.BaseEventLoop], None]) -> None:
        began_s = time.thread_time()
        run_once(loop)
        self._pieces.turns.add(time.thread_time() - began_s)

    def write(self) -> None:
        """Tell what came since the last time."""
        pieces, self._pieces = self._pieces, Pieces()
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(asdict(pieces)))
        os.replace(partial, self._file)

    def _note_garbage(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._garbage_began_s = time.thread_time()
        else:
            self._pieces.garbage.add(time.thread_time() - self._garbage_began_s)


def _name(callback: Any) -> str:
    """Return the function of the console that a piece belongs to, or `OTHERS`."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        code = getattr(getattr(callback, "__func__", callback), "__code__", None)
        return _of_console(code) or OTHERS
    return next((name for each in _awaited(task.get_coro()) if (name := _of_console(each))), OTHERS)


def _awaited(coroutine: Any) -> list[Any]:
    """Return the code of a coroutine, and of those that it waits for."""
    found = []
    while (code := getattr(coroutine, "cr_code", None)) is not None:
        found.append(code)
        coroutine = coroutine.cr_await
    return found


def _of_console(code: Any) -> str:
    is_of_console = code is not None and any(folder in code.co_filename for folder in CONSOLE)
    return str(code.co_qualname) if is_of_console else ""


def timed(file: Path) -> Any:
    """Return what makes a loop whose pieces are timed."""
    clock, run = Clock(file), asyncio.Handle._run
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]
    asyncio.Handle._run = lambda handle: clock.run(handle, run)  # type: ignore[method-assign,assignment]
    asyncio.BaseEventLoop._run_once = lambda loop: clock.turn(loop, run_once)  # type: ignore[attr-defined]

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()
        loop.add_signal_handler(signal.SIGUSR2, clock.write)
        return loop

    return new_event_loop


if __name__ == "__main__":
    uvloop.new_event_loop = timed(Path(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
