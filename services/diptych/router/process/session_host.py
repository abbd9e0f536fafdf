"""The sessions of a router that is several processes: its parent has the desk, and so one line, counted once.

Each process is at the other end of a pair of sockets. A process that dies takes nothing along: the places of clients
that waited there are kept, as those of clients that leave, sessions stay open, and requests that ran there have ended.
The pools are what the processes that are there tell of them together, each its own share; they are asked again and
again, and when a client comes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial
from typing import Final

from diptych.common.errors import DiptychError, InternalError
from diptych.router.admission.session_desk import LineUsage, SessionDesk
from diptych.router.admission.session_door import LOOK_S, ContextOfRequest, SessionDoor
from diptych.router.admission.session_line import Key
from diptych.router.process.session_words import (
    Answer,
    Begin,
    Close,
    Counted,
    End,
    Leave,
    Open,
    Pools,
    Tell,
    Uncounted,
    Word,
    decoded,
    encoded,
    failed,
)
from diptych.router.values.kept_sessions import Terms

logger = logging.getLogger(__name__)

FRESH_S: Final = 0.1  # for so long what processes have told of the pools is not asked for again


class SessionHost:
    """The desk of several processes. It is the event loop's alone; `run` must be running."""

    def __init__(self, num_models: int, clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S) -> None:
        models = range(num_models)
        doors = [SessionDoor(partial(self._capacity, n), partial(self._problem, n), clock, look_s) for n in models]
        self.desk = SessionDesk(doors, clock)
        self._clock = clock
        self._look_s = look_s
        self._processes: dict[int, _Process] = {}
        self._asked_s = -FRESH_S
        self._counted: LineUsage | None = None  # that was told last,
        self._shown_by: _Process | None = None  # and whom

    async def run(self) -> None:
        """Ask for the pools, and tell what is counted, until cancelled.

        They are asked for though nobody waits: who comes next is let in by what they are, and metrics show it.
        """
        while True:
            await asyncio.sleep(self._look_s)
            self._ask_for_pools()
            self._tell_counts()

    async def serve(self, index: int, connection: socket.socket) -> None:
        """Serve a process until it has ended, or closes its end."""
        reader, writer = await asyncio.open_connection(sock=connection)
        process = self._processes[index] = _Process(self.desk, writer)
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._hear(process, decoded(line))
        except ConnectionError:
            pass  # it died
        except Exception:
            logger.exception("process %d has no part in the line of sessions any more: it can't be understood", index)
        finally:
            if self._processes.get(index) is process:
                del self._processes[index]
            process.gone()

    def _hear(self, process: _Process, word: Word) -> None:
        if isinstance(word, Pools):
            before, process.pools[word.model] = process.pools.get(word.model), word
            if word != before:
                self.desk.doors[word.model].look()
            return
        if isinstance(word, Open) and word.wait_s:
            self._ask_for_pools()
        process.hear(word)

    def _ask_for_pools(self) -> None:
        if self._clock() - self._asked_s < FRESH_S:
            return
        self._asked_s = self._clock()
        for process in self._processes.values():
            process.say(Tell())

    def _tell_counts(self) -> None:
        """Tell the first process, and no other: metrics are summed over all of them."""
        if not self._processes:
            return
        counted, process = self.desk.usage(), self._processes[min(self._processes)]
        for other in self._processes.values():
            if other is self._shown_by is not process:
                other.say(Uncounted())
        if self._shown_by is not process or counted != self._counted:
            process.say(Counted(*astuple(counted)))
        self._shown_by, self._counted = process, counted

    def _capacity(self, model: int) -> int:
        told = [process.pools.get(model) for process in self._processes.values()]
        return sum(pools.capacity_tokens for pools in told if pools is not None)

    def _problem(self, model: int) -> str | None:
        told = [process.pools.get(model) for process in self._processes.values()]
        return next((pools.problem for pools in told if pools is not None and pools.problem), None)


class _Process:
    """One process, as its parent knows it."""

    def __init__(self, desk: SessionDesk, writer: asyncio.StreamWriter) -> None:
        self._desk = desk
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, tuple[AbstractContextManager[ContextOfRequest], ContextOfRequest]] = {}
        self.pools: dict[int, Pools] = {}  # by model

    def say(self, word: Word) -> None:
        """Tell it something, unless its end of the sockets is known to be gone, though nobody was told yet."""
        if not self._writer.is_closing():
            self._writer.write(encoded(word))

    def hear(self, word: Word) -> None:
        match word:
            case Open(call=call) | Close(call=call):
                self._calls[call] = task = asyncio.ensure_future(self._answer(word))
                task.add_done_callback(lambda _: self._calls.pop(call, None))
            case Leave(call) if call in self._calls:
                self._calls[call].cancel()
            case Begin(request, owner, session_id, model):
                held = self._desk.request(model, Key(owner, session_id))
                self._requests[request] = held, held.__enter__()
            case End(request, context_tokens) if request in self._requests:
                self._end(request, context_tokens)

    def gone(self) -> None:
        """The process has ended: whatever it had with it."""
        self._writer.close()
        for task in self._calls.values():
            task.cancel()
        for request in list(self._requests):
            self._end(request, 0)

    async def _answer(self, word: Open | Close) -> None:
        try:
            self.say(Answer(word.call, await self._do(word)))
        except DiptychError as error:
            self.say(failed(word.call, error))
        except Exception:
            logger.exception("a session of a client")
            self.say(failed(word.call, InternalError("internal error; the router's log has the details")))

    async def _do(self, word: Open | Close) -> bool:
        key = Key(word.owner, word.session_id)
        if isinstance(word, Close):
            return await self._desk.close(key)
        terms = Terms(word.max_tokens, word.idle_s, word.expected_tokens, word.model)
        await self._desk.open(key, terms, word.wait_s)
        return True

    def _end(self, request: int, context_tokens: int) -> None:
        held, context = self._requests.pop(request)
        context.num_tokens = context_tokens
        held.__exit__(None, None, None)
