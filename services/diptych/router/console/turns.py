"""Does work in pieces on the event loop, and lets others have their turn between them.

A look at 64 workers takes ten milliseconds, in which no request would go on. Here it takes `PIECE_S` at a time, with a
pause after each in which the loop does what is due. Time is that of this thread's processor: what others take of the
machine is not counted.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Generic, NamedTuple, TypeVar

from diptych.router.console.pieces import Pieces

PIECE_S: Final = 1.5e-4
PAUSE_S: Final = 1e-3

T = TypeVar("T")


async def in_turns(work: Pieces[T]) -> T:
    """Return what the work makes."""
    return (await timed_turns(work)).made


class Done(NamedTuple, Generic[T]):
    """What was made, and the processor time that it took."""

    made: T
    took_s: float


async def timed_turns(work: Pieces[T]) -> Done[T]:
    """Return what the work makes, and what it cost."""
    took_s, begun_s = 0.0, time.thread_time()
    while True:
        try:
            next(work)
        except StopIteration as end:
            return Done(end.value, took_s + time.thread_time() - begun_s)
        piece_s = time.thread_time() - begun_s
        if piece_s >= PIECE_S:
            await asyncio.sleep(PAUSE_S)
            took_s, begun_s = took_s + piece_s, time.thread_time()
