"""A router that tells how long each piece of work keeps its event loop, by what the piece belongs to.

    python -m router_rig.timed_router OUT.json router --insecure ...

A piece is one callback of the loop, or one step of a task: nothing else is served meanwhile. Times are processor time
of the loop's thread, so what else runs on the machine is not counted. At SIGUSR2 the pieces since the last signal are
written to the file, and of each request how long pieces of the console ran while it waited for its first byte: what the
console can have added to that, however busy the machine is. Rule: the router is the product's own, but for its loop,
which is asyncio's: that of uvloop can't be looked into.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.cli.main import main
from diptych.router import console_wiring
from diptych.router.console.console import Console
from diptych.router.console_wiring import ConsoleParts

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
    waited_s: list[float] = field(default_factory=list)  # of each request: pieces of the console before its first byte


class Clock:
    """Times the pieces of one loop."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pieces = Pieces()
        self._garbage_began_s = 0.0
        self._console_s = 0.0  # of pieces of the console so far;
        self._turns_s = (0.0, 0.0)  # when this turn of the loop and the one before it began
        gc.callbacks.append(self._note_garbage)

    def run(self, handle: asyncio.Handle, run: Callable[[asyncio.Handle], None]) -> None:
        callback = handle._callback  # type: ignore[attr-defined]  # a handle that has run forgets it
        began_s = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began_s
        name = _name(callback)
        self._pieces.kinds.setdefault(name, Kind()).add(took_s)
        if name != OTHERS:
            self._console_s += took_s

    def turn(self, loop: asyncio.BaseEventLoop, run_once: Callable[[asyncio.BaseEventLoop], None]) -> None:
        self._turns_s = self._turns_s[1], self._console_s
        began_s = time.thread_time()
        run_once(loop)
        self._pieces.turns.add(time.thread_time() - began_s)

    def arrived(self) -> float:
        """A request is heard of, which may have come in the turn before; return what `waited` wants to have."""
        return self._turns_s[0]

    def waited(self, arrived: float) -> None:
        """Its first byte goes out."""
        self._pieces.waited_s.append(self._console_s - arrived)

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


def timed(clock: Clock) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes a loop whose pieces are timed."""
    run, run_once = asyncio.Handle._run, asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]
    asyncio.Handle._run = lambda handle: clock.run(handle, run)  # type: ignore[method-assign,assignment]
    asyncio.BaseEventLoop._run_once = lambda loop: clock.turn(loop, run_once)  # type: ignore[attr-defined]

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()
        loop.add_signal_handler(signal.SIGUSR2, clock.write)
        return loop

    return new_event_loop


def noting(app: ASGIApp, clock: Clock) -> ASGIApp:
    """Return an application whose requests are noted."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        arrived: float | None = clock.arrived()

        async def note(message: Message) -> None:
            nonlocal arrived
            if arrived is not None and message.get("body"):
                clock.waited(arrived)
                arrived = None
            await send(message)

        await app(scope, receive, note if scope["type"] == "http" and scope["method"] == "POST" else send)

    return serve


if __name__ == "__main__":
    clock, add_console = Clock(Path(sys.argv[1])), console_wiring.add_console

    def add(app: ASGIApp, parts: ConsoleParts) -> tuple[ASGIApp, Console]:
        served, console = add_console(app, parts)
        return noting(served, clock), console

    console_wiring.add_console = add
    uvloop.new_event_loop = timed(clock)  # type: ignore[assignment]
    raise SystemExit(main(sys.argv[2:]))
