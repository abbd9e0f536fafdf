"""Clients behind a `Service` that always have a request open, each with a known answer.

A client tries another router when the connection is refused or breaks before any byte. One whose router was killed
later begins again, and is counted apart; whatever else breaks is a failure.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from drill.cluster import HUNG_S, Router
from drill.questions import Question
from drill.reply import Reply
from drill.service import Service
from drill.tally import Tally

logger = logging.getLogger(__name__)

SLOW_S: Final = 3.0  # worth a line in the log
SHARE_STREAMED: Final = 0.8
MAX_TRIES: Final = 10  # for each answer that is wanted, where requests may fail


@dataclass(eq=False, slots=True)
class Request:
    """A client's question on its way."""

    question: Question
    is_streamed: bool
    began_s: float = field(default_factory=time.monotonic)
    longest_gap_s: float = 0.0
    _newest_s: float | None = None  # when a token came last
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def next_token(self) -> asyncio.Future[None]:
        """Done when another token has come, or the request has ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def note_tokens(self) -> None:
        now_s = time.monotonic()
        if self._newest_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._newest_s)
        self._newest_s = now_s
        self.wake()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():  # whoever waited may have given up
                waiter.set_result(None)
        self._waiters.clear()


class Traffic:
    """Keeps `num_streams` requests open from `start` to `stop`."""

    def __init__(self, service: Service, questions: Sequence[Question], rng: random.Random) -> None:
        self._service = service
        self._questions = questions
        self._rng = rng
        self._running: dict[asyncio.Task[None], Request] = {}
        self._clients: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._at_least = 0
        self._killed: set[tuple[Router, int]] = set()  # a router and its start
        self.tally = Tally()

    def start(self, num_streams: int, at_least: int = 0) -> None:
        """Until `stop`, and on until `at_least` requests were answered, however slow the machine is."""
        self._is_stopping, self._at_least, self.tally = False, at_least, Tally()
        self._clients = [asyncio.create_task(self._client()) for _ in range(num_streams)]

    async def stop(self) -> Tally:
        """Offer nothing more, let what is open end, and return what became of all."""
        self._is_stopping = True
        await asyncio.gather(*self._clients)
        return self.tally

    def note_killed(self, router: Router) -> None:
        """What breaks off with this router was its own."""
        self._killed.add((router, router.num_starts))

    async def leave(self, count: int) -> None:
        """Have `count` clients of open requests disconnect."""
        for task in self._rng.sample(list(self._running), min(count, len(self._running))):
            task.cancel()

    async def next_tokens(self) -> None:
        """Wait until every stream that is open now has another token, or has ended."""
        streams = [request.next_token() for request in self._running.values() if request.is_streamed]
        await asyncio.gather(*streams)

    async def ask_once(self) -> None:
        """Have one more request answered, a short one."""
        async with httpx.AsyncClient(timeout=None) as client:
            await self._offer(client, min(self._questions, key=lambda question: len(question.answer)))

    async def _client(self) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            while not self._is_stopping or self._is_too_little():
                await self._offer(client, self._rng.choice(self._questions))

    def _is_too_little(self) -> bool:
        """Not, once it is known that something is wrong."""
        tally, wanted = self.tally, self._at_least
        return tally.answered < wanted and not tally.unanswered and tally.offered < MAX_TRIES * wanted

    async def _offer(self, client: httpx.AsyncClient, question: Question) -> None:
        self.tally.offered += 1
        request = Request(question, self._rng.random() < SHARE_STREAMED)
        task = asyncio.create_task(self._see_through(client, request))
        self._running[task] = request
        try:
            await asyncio.wait((task,))
        finally:
            del self._running[task]
            request.wake()
        if task.cancelled():
            self.tally.left += 1
        else:
            task.result()

    async def _see_through(self, client: httpx.AsyncClient, request: Request) -> None:
        """Ask until there is an answer or a failure."""
        reply, avoided = Reply(), None
        try:
            async with asyncio.timeout(HUNG_S):
                while True:
                    router = await self._service.pick(avoided)
                    origin, reply = (router, router.num_starts), Reply()
                    await _exchange(client, router, request, reply)
                    self.tally.check(reply, request.question)
                    if not self._may_begin_again(reply, origin):
                        break
                    avoided = router
        except TimeoutError:
            reply.broken = f"no end within {HUNG_S:g} s"
        self.tally.end(reply)
        self._measure(request, reply)

    def _may_begin_again(self, reply: Reply, origin: tuple[Router, int]) -> bool:
        if not reply.broken:
            return False
        if reply.status == 0:
            self.tally.tried_elsewhere += 1
        elif origin in self._killed:
            self.tally.held_by_killed += 1
        else:
            return False
        return True

    def _measure(self, request: Request, reply: Reply) -> None:
        elapsed_s = time.monotonic() - request.began_s
        self.tally.slowest_s = max(self.tally.slowest_s, elapsed_s)
        self.tally.longest_gap_s = max(self.tally.longest_gap_s, request.longest_gap_s)
        if elapsed_s > SLOW_S:
            words = "slow: %.1f s, status %d, %d tokens, longest gap %.1f s, %s"
            logger.info(words, elapsed_s, reply.status, len(reply.tokens), request.longest_gap_s, reply.timings)


async def _exchange(client: httpx.AsyncClient, router: Router, request: Request, reply: Reply) -> None:
    """Ask one router; fill `reply` as it comes."""
    question = request.question
    body = {"model": "", "prompt": list(question.prompt), "max_tokens": len(question.answer), "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": request.is_streamed}
    url, headers = f"{router.url}/v1/completions", {"x-diptych-timings": "1"}
    try:
        async with client.stream("POST", url, json=body, headers=headers) as response:
            reply.status, reply.may_retry = response.status_code, "retry-after" in response.headers
            async for line in response.aiter_lines():
                had = len(reply.tokens)
                reply.receive(line)
                if len(reply.tokens) > had:
                    request.note_tokens()
        if not reply.is_complete:
            reply.broken = "the stream ended early"
    except httpx.HTTPError as error:
        reply.broken = f"{router}: {type(error).__name__}: {error}"
