"""What a scheduler group has to end before it holds nothing: the rooms that routers opened, and what the scheduler
keeps of them after their answer (pages that a peer may still write, or has not acknowledged).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from diptych.engine.frontend.questions import Questions
from diptych.engine.frontend.sessions import Sessions
from diptych.v1 import engine_pb2

logger = logging.getLogger(__name__)

ASK_AGAIN_S: Final = 0.05  # answered rooms hold pages for a round trip to the peer, seldom longer


class Commands(Protocol):
    """What takes commands for the scheduler."""

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None: ...


class OpenWork:
    """Implements `diptych.common.drain.draining.Work` for a scheduler group."""

    def __init__(self, sessions: Sessions, scheduler: Commands, questions: Questions) -> None:
        self._sessions = sessions
        self._scheduler = scheduler
        self._questions = questions

    @property
    def num_left(self) -> int:
        return self._sessions.num_open_rooms

    @property
    def oldest_s(self) -> float:
        return self._sessions.oldest_s

    async def wait_until_none(self) -> None:
        """Raises `SchedulerDied`."""
        await self._sessions.idle.wait()
        status = await self._questions.status()
        try:
            while status.open_rooms:
                await asyncio.sleep(ASK_AGAIN_S)
                status = await self._questions.status()
        except asyncio.CancelledError:
            logger.warning("%d rooms still hold KV after their answer", status.open_rooms)
            raise

    async def hand_back(self) -> None:
        """A prefill worker keeps what it has handed off until decode has acknowledged it."""
        await self._scheduler.send(engine_pb2.SchedulerCommands(hand_back=self._sessions.rooms()))
