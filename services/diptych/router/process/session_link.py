"""The sessions of a router that is several processes, as one of these reaches them: a link to the desk of the parent.

To open and to close a session is a call that is answered, and so is that a turn begins and has ended. Other requests
wait for nothing: that they come and go is told. What is told within one round of the event loop goes out at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from diptych.common.errors import DiptychError, Unavailable
from diptych.router.admission.session_desk import LineUsage
from diptych.router.admission.session_door import LEFT, ContextOfRequest
from diptych.router.admission.session_line import Key
from diptych.router.process.session_words import (
    MAX_PROBLEM_LEN,
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
    failure_in,
    read_word,
)
from diptych.router.values.kept_sessions import MAX_TOKENS, TOKEN_TYPE, Follow, Terms, Tokens, Turn

logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0  # beyond what a call may wait in line: the parent does little else
MAX_UNSENT_BYTES: Final = 1 << 23  # beyond which no more requests are told of: the parent does not read
SILENT: Final = "the parent of this router's processes does not answer"
ENDS: Final = "the processes of this router end"


@dataclass(frozen=True, slots=True)
class PoolsOfModel:
    """What a process sees of the pools of one model."""

    capacity: Callable[[], int]  # tokens of context, of this process's share
    problem: Callable[[], str | None]
    wait_for_change: Callable[[], Awaitable[None]]  # of either, perhaps


class SessionLink:
    """The desk of a router's sessions, from one of its processes. `run` must be running."""

    def __init__(self, connection: socket.socket, pools: Sequence[PoolsOfModel]) -> None:
        self._connection = connection
        self._pools = pools
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._opening: set[int] = set()  # of these, who opens a session
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
            async with asyncio.TaskGroup() as group:
                telling = [group.create_task(self._tell_pools(*each)) for each in enumerate(self._pools)]
                with suppress(ConnectionError, EOFError):
                    while True:
                        self._hear(await read_word(reader))
                for task in telling:
                    task.cancel()
        finally:
            self._is_over = True
            self._unsent.clear()
            self._fail(self._calls, Unavailable(ENDS))
            self._writer.close()

    async def open(self, key: Key, terms: Terms, wait_s: float) -> None:
        if self._has_left:
            raise _left()
        call = next(self._numbers)
        word = Open(call, *key, terms.max_tokens, terms.idle_s, terms.expected_tokens, terms.model, wait_s)
        self._opening.add(call)
        try:
            await self._call(word, wait_s + ANSWER_S)
        finally:
            self._opening.discard(call)

    async def close(self, key: Key) -> bool:
        return (await self._call(Close(next(self._numbers), *key), ANSWER_S)).was_there

    @contextmanager
    def request(self, model: int, key: Key) -> Generator[ContextOfRequest, None, None]:
        context, number = ContextOfRequest(), next(self._numbers)
        is_told = bool(key.session_id) and not self._is_over and self._num_unsent < MAX_UNSENT_BYTES
        if is_told:
            self._say(Come(number, *key, model))
        try:
            yield context
        finally:
            if is_told:
                self._say(Go(number, context.num_tokens))

    @asynccontextmanager
    async def turn(self, model: int, owner: str, follow: Follow, name: str) -> AsyncGenerator[Turn, None]:
        call = next(self._numbers)
        behind = (follow.session_id, follow.rid, follow.offset, follow.replace, follow.drop_previous_output)
        try:
            begun = await self._call(Begin(call, model, owner, *behind, name), ANSWER_S)
            yield Turn(array(TOKEN_TYPE, begun.tokens), partial(self._keep, call))
        finally:  # also of one that is cancelled in the moment in which it is answered
            self._say(Leave(call))

    async def _keep(self, turn: int, prompt: Tokens, output: Tokens) -> None:
        """Have the parent keep a turn; the answer to it is whole without that."""
        if len(prompt) + len(output) > MAX_TOKENS:
            return  # no session has room for it
        if self._num_unsent >= MAX_UNSENT_BYTES:
            logger.warning("a turn of a session is not kept: %s", SILENT)
            return
        tokens = b"".join((memoryview(prompt), memoryview(output)))
        try:
            await self._call(Keep(next(self._numbers), turn, len(prompt), tokens), ANSWER_S)
        except DiptychError as error:
            logger.warning("a turn of a session is not kept: %s", error)

    def usage(self) -> LineUsage | None:
        return self._counted

    def leave(self) -> None:
        """Open no more sessions. Those that are open are used and closed as before, until the process ends."""
        self._has_left = True
        self._fail(self._opening, _left())

    @property
    def _num_unsent(self) -> int:
        """Bytes that the parent has not read, but for those of this round of the event loop."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    async def _call(self, word: Call, timeout_s: float) -> Answer:
        if self._is_over:
            raise Unavailable(ENDS)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._say(word)
        self._calls[word.call] = answer
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise Unavailable(SILENT) from None
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
            case Counted():
                self._counted = LineUsage(*word)
            case Uncounted():
                self._counted = None

    async def _tell_pools(self, model: int, pools: PoolsOfModel) -> None:
        """Tell what this process sees of a model's pools, whenever that has changed."""
        told: Pools | None = None
        while True:
            word = Pools(model, pools.capacity(), (pools.problem() or "")[:MAX_PROBLEM_LEN])
            if word != told:
                self._say(word)
                told = word
            await pools.wait_for_change()

    def _fail(self, calls: Iterable[int], error: DiptychError) -> None:
        for call in calls:
            if call in self._calls and not self._calls[call].done():
                self._calls[call].set_result(failed(call, error))

    def _say(self, word: Word) -> None:
        if self._is_over:
            return
        words = encoded(word)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(words)

    def _flush(self) -> None:
        if self._writer is not None and self._unsent and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
            self._unsent.clear()


def _left() -> Unavailable:
    return Unavailable(LEFT, retry_after_s=1)
