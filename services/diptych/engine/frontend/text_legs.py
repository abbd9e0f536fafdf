"""Stands before a scheduler and holds back the legs whose prompt is text, until it is tokens. No other leg waits.

Rule: a leg that is held back is answered here, whatever ends it: an abort, its deadline, a worker that leaves, a text
that can't be served. Once it is passed on, its end is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.engine.frontend.scheduler_client import Commands
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.generation.leg_prompt import prompt_len, words_far_too_long, words_too_long
from diptych.generation.segments import content_len
from diptych.v1 import worker_pb2
from diptych.v1.engine_pb2 import SchedulerCommands
from diptych.v1.worker_pb2 import LegError, LegOutput, StartLeg

logger = logging.getLogger(__name__)

MAX_HELD_CHARS: Final = 256 << 20  # of texts that wait for a thread

_ABORTED: Final = LegError(code=worker_pb2.ERROR_CODE_ABORTED, message="aborted by the router")
_HANDED_BACK: Final = LegError(code=worker_pb2.ERROR_CODE_HANDED_BACK, message="the worker is leaving")
_DEADLINE: Final = LegError(code=worker_pb2.ERROR_CODE_DEADLINE, message="the deadline passed before it was tokenised")
_OVERLOADED: Final = LegError(code=worker_pb2.ERROR_CODE_OVERLOADED, message="too much text waits to be tokenised here")


class _Read(NamedTuple):
    """A text that is tokens now."""

    num_tokens: int
    took_s: float  # with the wait for a thread


class TextLegs:
    """Implements `Commands` before a scheduler's own."""

    def __init__(
        self,
        scheduler: Commands,
        tokenizers: TokenizerManager,
        answer: Callable[[Iterable[LegOutput]], None],
        context_len: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizers = tokenizers
        self._answer = answer
        self._context_len = context_len  # tokens, prompt and output, that the scheduler takes
        self._clock = clock
        self._held: dict[int, tuple[asyncio.Task[None], int]] = {}  # with its number of characters
        self._held_chars = 0
        self._read: dict[int, _Read] = {}  # of rooms that were passed on and have not ended

    async def send(self, commands: SchedulerCommands) -> None:
        texts = [leg for leg in commands.start if leg.prompt_text]
        for leg in texts:
            self._hold(leg)
        if texts:
            others = [leg for leg in commands.start if not leg.prompt_text]
            del commands.start[:]
            commands.start.extend(others)
        self._end(commands.abort, _ABORTED)
        self._end(commands.hand_back, _HANDED_BACK)
        await self._scheduler.send(commands)  # it ignores rooms that it does not know

    def note(self, outputs: Iterable[LegOutput]) -> None:
        """Say in what the scheduler answers how many tokens the text had, and how long they took to make.

        The router can't know.
        """
        if not self._read:
            return
        for output in outputs:
            if output.room in self._read and output.HasField("stats"):
                read = self._read[output.room]
                output.stats.prompt_tokens, output.stats.tokenize_us = read.num_tokens, round(read.took_s * 1e6)
            if output.finish_reason or output.HasField("error"):
                self._read.pop(output.room, None)

    def _hold(self, leg: StartLeg) -> None:
        num_chars = len(leg.prompt_text)
        if self._held_chars + num_chars > MAX_HELD_CHARS:
            self._answer([LegOutput(room=leg.room, error=_OVERLOADED)])
            return
        self._held_chars += num_chars
        self._held[leg.room] = asyncio.create_task(self._pass_on(leg, self._clock())), num_chars

    def _end(self, rooms: Iterable[int], error: LegError) -> None:
        for room in rooms:
            if room in self._held:
                self._release(room).cancel()  # perhaps before its first step: it may never run
                self._answer([LegOutput(room=room, error=error)])

    def _release(self, room: int) -> asyncio.Task[None]:
        task, num_chars = self._held.pop(room)
        self._held_chars -= num_chars
        return task

    async def _pass_on(self, leg: StartLeg, came_s: float) -> None:
        error = await self._tokenize(leg)
        self._release(leg.room)
        took_s = self._clock() - came_s
        error = error or _spend(leg, took_s)
        if error:
            self._answer([LegOutput(room=leg.room, error=error)])
            return
        self._read[leg.room] = _Read(prompt_len(leg), took_s)
        await self._scheduler.send(SchedulerCommands(start=[leg]))

    async def _tokenize(self, leg: StartLeg) -> LegError | None:
        """Put tokens in the place of the text; return why that can't be."""
        context_len = self._context_len()
        try:
            tokens = await self._tokenizers.encode(
                leg.prompt_text, context_len, add_special_tokens=leg.add_special_tokens, namespace=leg.cache_salt
            )
        except InvalidRequest as error:
            return LegError(code=worker_pb2.ERROR_CODE_INVALID, message=str(error))
        except DiptychError as error:
            return LegError(code=worker_pb2.ERROR_CODE_INTERNAL, message=str(error))
        except Exception:
            logger.exception("room %016x can't be tokenised", leg.room)
            return LegError(code=worker_pb2.ERROR_CODE_INTERNAL, message="its prompt can't be tokenised")
        if tokens is None:
            return LegError(code=worker_pb2.ERROR_CODE_TOO_LONG, message=words_far_too_long(context_len))
        num_tokens = len(tokens) + len(leg.prompt_token_ids) + content_len(leg.contents)
        if num_tokens >= context_len:
            words = words_too_long(num_tokens, context_len)
            return LegError(code=worker_pb2.ERROR_CODE_TOO_LONG, message=words)
        leg.ClearField("prompt_text")
        leg.prompt_tokens = tokens.tobytes()
        return None


def _spend(leg: StartLeg, waited_s: float) -> LegError | None:
    """Take the time that a leg has waited here from what it has left; return an error if that was all of it."""
    if not leg.timeout_ms:
        return None
    left_ms = leg.timeout_ms - round(waited_s * 1000)
    leg.timeout_ms = max(1, left_ms)
    return _DEADLINE if left_ms <= 0 else None
