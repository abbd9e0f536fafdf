"""The sessions of a router that is several processes: its parent has the desk, and so one line, counted once.

Each process is at the other end of a pair of sockets. A process that dies takes nothing along: the places of clients
that waited there are kept, as those of clients that leave, sessions stay open, and requests that ran there have ended.
The pools are what the processes that are there tell of them together, each its own share, whenever that has changed.
Turns are the parent's, too, so that one goes on behind another whichever processes serve them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial

from diptych.common.errors import DiptychError, InternalError
from diptych.router.admission.session_desk import LineUsage, SessionDesk
from diptych.router.admission.session_door import LOOK_S, ContextOfRequest, SessionDoor
from diptych.router.admission.session_line import Key
from diptych.router.process.session_words import (
    Answer,
    Begin,
    Call,
    Close,
    Come,
    Counted,
    Go,
    Keep,
    Leave,
    Open,
    Pools,
    Uncounted,
    Word,
    encoded,
    failed,
    read_word,
)
from diptych.router.values.kept_sessions import TOKEN_TYPE, Follow, Place, Terms

logger = logging.getLogger(__name__)


class SessionHost:
    """The desk of several processes. It is the event loop's alone; `run` must be running."""

    def __init__(self, num_models: int, clock: Callable[[], float] = time.monotonic, look_s: float = LOOK_S) -> None:
        models = range(num_models)
        doors = [SessionDoor(partial(self._capacity, n), partial(self._problem, n), clock, look_s) for n in models]
        self.desk = SessionDesk(doors, clock)
        self._look_s = look_s
        self._processes: dict[int, _Process] = {}
        self._counted: LineUsage | None = None  # that was told last,
        self._shown_by: _Process | None = None  # and whom

    async def run(self) -> None:
        """Tell what is counted, now and again, until cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            self._tell_counts()

    async def serve(self, index: int, connection: socket.socket) -> None:
        """Serve a process until it has ended, or closes its end."""
        reader, writer = await asyncio.open_connection(sock=connection)
        process = self._processes[index] = _Process(self.desk, writer)
        try:
            while True:
                self._hear(process, await read_word(reader))
        except (ConnectionError, EOFError):
            pass  # it has ended
        except Exception:
            logger.exception("process %d has no part in the line of sessions any more: it can't be understood", index)
        finally:
            if self._processes.get(index) is process:
                del self._processes[index]
            process.gone()

    def _hear(self, process: _Process, word: Word) -> None:
        if isinstance(word, Pools):
            process.pools[word.model] = word
            self.desk.doors[word.model].look()
        else:
            process.hear(word)

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
        self._turns: dict[int, Place] = {}  # that run
        self._requests: dict[int, tuple[AbstractContextManager[ContextOfRequest], ContextOfRequest]] = {}
        self.pools: dict[int, Pools] = {}  # by model

    def say(self, word: Word) -> None:
        """Tell it something, unless its end of the sockets is known to be gone, though nobody was told yet."""
        if not self._writer.is_closing():
            self._writer.write(encoded(word))

    def hear(self, word: Word) -> None:
        match word:
            case Open(call=call) | Close(call=call) | Begin(call=call) | Keep(call=call):
                self._calls[call] = task = asyncio.ensure_future(self._answer(word))
                task.add_done_callback(lambda _: self._calls.pop(call, None))
            case Leave(call):
                self._end_turn(call)
                if call in self._calls:
                    self._calls[call].cancel()
            case Come(request, owner, session_id, model):
                held = self._desk.request(model, Key(owner, session_id))
                self._requests[request] = held, held.__enter__()
            case Go(request, context_tokens) if request in self._requests:
                self._end(request, context_tokens)

    def gone(self) -> None:
        """The process has ended: whatever it had with it."""
        self._writer.close()
        for task in self._calls.values():
            task.cancel()
        for call in list(self._turns):
            self._end_turn(call)
        for request in list(self._requests):
            self._end(request, 0)

    async def _answer(self, word: Call) -> None:
        try:
            self.say(await self._done(word))
        except Exception:
            logger.exception("a session of a client")
            self.say(failed(word.call, InternalError("internal error; the router's log has the details")))

    async def _done(self, word: Call) -> Answer:
        try:
            return await self._do(word)
        except DiptychError as error:
            return failed(word.call, error)

    async def _do(self, word: Call) -> Answer:
        match word:
            case Open():
                terms = Terms(word.max_tokens, word.idle_s, word.expected_tokens, word.model)
                await self._desk.open(Key(word.owner, word.session_id), terms, word.wait_s)
            case Close():
                return Answer(word.call, await self._desk.close(Key(word.owner, word.session_id)))
            case Begin():
                follow = Follow(word.session_id, word.rid, word.offset, word.replace, word.drop_previous_output)
                before, self._turns[word.call] = self._desk.begin(word.model, word.owner, follow, word.name)
                return Answer(word.call, True, tokens=before.tobytes())
            case Keep():
                tokens = array(TOKEN_TYPE, word.tokens)
                self._turns[word.turn].keep(tokens[: word.prompt_len], tokens[word.prompt_len :])
        return Answer(word.call, True)

    def _end_turn(self, call: int) -> None:
        if (place := self._turns.pop(call, None)) is not None:
            self._desk.end(place)

    def _end(self, request: int, context_tokens: int) -> None:
        held, context = self._requests.pop(request)
        context.num_tokens = context_tokens
        held.__exit__(None, None, None)
