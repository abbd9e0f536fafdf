"""The sessions of a router that is several processes, as one of these reaches them: a link to the desk of the parent.

To open and to close a session is a call that is answered. Requests wait for nothing: that they begin and end is told.
What is told within one round of the event loop goes out at once.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import Conflict, DiptychError, Unavailable
from diptych.router.admission.session_desk import LineUsage
from diptych.router.admission.session_door import LEFT, ContextOfRequest
from diptych.router.admission.session_line import Key
from diptych.router.process.session_words import (
    MAX_PROBLEM_LEN,
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
    failure_in,
)
from diptych.router.values.kept_sessions import Follow, Terms, Turn

ANSWER_S: Final = 5.0  # beyond what a call may wait in line: the parent does little else
MAX_UNSENT_BYTES: Final = 1 << 20  # beyond which no more requests are told of: the parent does not read
ENDS: Final = "the processes of this router end"


@dataclass(frozen=True, slots=True)
class PoolsOfModel:
    """What a process sees of the pools of one model."""

    capacity: Callable[[], int]  # tokens of context, of this process's share
    problem: Callable[[], str | None]


class SessionLink:
    """The desk of a router's sessions, from one of its processes. `run` must be running."""

    def __init__(self, connection: socket.socket, pools: Sequence[PoolsOfModel], num_processes: int) -> None:
        self._connection = connection
        self._pools = pools
        self._num_processes = num_processes
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._counted: LineUsage | None = None
        self._has_left = False  # nobody opens a session here any more
        self._is_over = False  # the parent is gone

    async def run(self) -> None:
        """Carry words to and from the parent, until it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._flush()
        try:
            with suppress(ConnectionError):
                while (line := await reader.readline()).endswith(b"\n"):
                    self._hear(decoded(line))
        finally:
            self._is_over = True
            self._unsent.clear()
            self._fail_calls(Unavailable(ENDS))
            self._writer.close()

    async def open(self, key: Key, terms: Terms, wait_s: float) -> None:
        if not wait_s:
            raise Conflict(f"{self._words}: ask for room with wait_s, and send whole prompts")
        if self._has_left:
            raise _left()
        call = next(self._numbers)
        word = Open(call, *key, terms.max_tokens, terms.idle_s, terms.expected_tokens, terms.model, wait_s)
        await self._call(word, wait_s + ANSWER_S)

    async def close(self, key: Key) -> bool:
        return (await self._call(Close(next(self._numbers), *key), ANSWER_S)).was_there

    @contextmanager
    def request(self, model: int, key: Key) -> Generator[ContextOfRequest, None, None]:
        context, number = ContextOfRequest(), next(self._numbers)
        is_told = bool(key.session_id) and not self._is_over and self._num_unsent < MAX_UNSENT_BYTES
        if is_told:
            self._say(Begin(number, *key, model))
        try:
            yield context
        finally:
            if is_told:
                self._say(End(number, context.num_tokens))

    def turn(self, owner: str, follow: Follow, name: str, now_s: float) -> Turn:
        raise Conflict(f"{self._words}: send whole prompts, and name the session in x-diptych-session")

    def usage(self) -> LineUsage | None:
        return self._counted

    def leave(self) -> None:
        """Open no more sessions. Those that are open are used and closed as before, until the process ends."""
        self._has_left = True
        self._fail_calls(_left())

    @property
    def _words(self) -> str:
        return f"a router of {self._num_processes} processes keeps no turns of sessions"

    @property
    def _num_unsent(self) -> int:
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    async def _call(self, word: Open | Close, timeout_s: float) -> Answer:
        if self._is_over:
            raise Unavailable(ENDS)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[word.call] = answer
        self._say(word)
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise Unavailable("the parent of this router's processes does not answer") from None
        finally:
            if self._calls.pop(word.call, None) is not None:
                self._say(Leave(word.call))
        if (failure := failure_in(found)) is not None:
            raise failure
        return found

    def _hear(self, word: Word) -> None:
        match word:
            case Answer(call=call) if call in self._calls:
                if not (answer := self._calls.pop(call)).done():
                    answer.set_result(word)
            case Tell():
                for model, pools in enumerate(self._pools):
                    self._say(Pools(model, pools.capacity(), (pools.problem() or "")[:MAX_PROBLEM_LEN]))
            case Counted():
                self._counted = LineUsage(*word)
            case Uncounted():
                self._counted = None

    def _fail_calls(self, error: DiptychError) -> None:
        for call, answer in self._calls.items():
            if not answer.done():
                answer.set_result(failed(call, error))

    def _say(self, word: Word) -> None:
        if self._is_over:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encoded(word))

    def _flush(self) -> None:
        if self._writer is not None and self._unsent and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
            self._unsent.clear()


def _left() -> Unavailable:
    return Unavailable(LEFT, retry_after_s=1)
