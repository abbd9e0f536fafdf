"""Greedy requests with known answers, and what became of each of them."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

logger = logging.getLogger("chaos")

SLOW_S: Final = 3.0  # worth a line in the log
CLIENT_TIMEOUT_S: Final = 30.0  # a request that takes longer hangs
UNTOLD: Final = "0" * 16  # a digest of a leg that was lost after it had done its part
RETRY_STATUSES: Final = (429, 503)  # which must say when to try again


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what one engine alone answers to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(slots=True)
class Reply:
    """One exchange, as far as it came."""

    status: int = 0
    may_retry: bool = False  # it says when
    tokens: list[int] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False
    error: str = ""
    broken: str = ""  # why the exchange ended without an end

    def take(self, line: str) -> None:
        """Take an event of a stream, or the body of an answer that came as a whole."""
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_complete = True
        elif data:
            self._take(json.loads(data), is_event=data != line)

    def _take(self, said: dict[str, Any], *, is_event: bool) -> None:
        self.error = str(said.get("error", ""))
        self.tokens += [token for choice in said.get("choices", ()) for token in choice.get("token_ids") or ()]
        self.timings = said.get("diptych") or self.timings
        self.is_complete = not is_event


@dataclass(slots=True)
class Tally:
    """How the requests ended."""

    offered: int = 0
    answered: int = 0
    left: int = 0  # by their clients
    failed: Counter[int] = field(default_factory=Counter)  # by status; 200: by an event of a stream
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    pages_moved: int = 0
    digests_differ: int = 0
    slowest_s: float = 0.0  # from request to answer or error

    def add(self, reply: Reply, question: Question, elapsed_s: float) -> None:
        """Judge a reply. What was given out before an error must be right too."""
        self.slowest_s = max(self.slowest_s, elapsed_s)
        tokens, answer = reply.tokens, list(question.answer)
        if tokens != (answer if reply.is_complete and not reply.error else answer[: len(tokens)]):
            self.wrong.append(f"{tokens}, not {answer}; {reply.timings}")
        elif reply.error and (reply.may_retry or reply.status not in RETRY_STATUSES):
            self.failed[reply.status] += 1
        elif reply.is_complete and not reply.error:
            self._add_answer(reply)
        else:
            self.unanswered.append(f"status {reply.status} after {len(tokens)} tokens: {reply.broken or reply.error}")

    def _add_answer(self, reply: Reply) -> None:
        self.answered += 1
        self.pages_moved += reply.timings["pages_moved"]
        digests = {reply.timings["prefill_kv_digest"], reply.timings["decode_kv_digest"]}
        if len(digests) > 1:
            logger.info("digests: %s", reply.timings)
            self.digests_differ += UNTOLD not in digests


class Load:
    """Offers `count` requests at an even pace."""

    def __init__(self, url: str, questions: Sequence[Question], rng: random.Random, count: int) -> None:
        self._url = f"{url}/v1/completions"
        self._questions = questions
        self._rng = rng
        self._count = count
        self._running: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self._has_some = asyncio.Event()
        self.tally = Tally()

    async def run(self, rate: float) -> None:
        """Offer requests; return when each has ended."""
        began_s = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S, limits=limits) as client, asyncio.TaskGroup() as group:
            for number in range(self._count):
                await asyncio.sleep(began_s + number / rate - time.monotonic())
                self.tally.offered += 1
                task = group.create_task(self._ask(client, self._rng.choice(self._questions)))
                self._running[task] = None
                self._has_some.set()
                task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not self._running:
            self._has_some.clear()
        self.tally.left += task.cancelled()

    async def leave(self, count: int) -> None:
        """Have `count` clients of open requests disconnect, or the next one if there are none."""
        await self._has_some.wait()
        for task in self._rng.sample(list(self._running), min(count, len(self._running))):
            task.cancel()

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> None:
        began_s = time.monotonic()
        body = {"model": "", "prompt": list(question.prompt), "max_tokens": len(question.answer)}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": self._rng.random() < 0.7}
        reply = Reply()
        try:
            async with client.stream("POST", self._url, json=body, headers={"x-diptych-timings": "1"}) as response:
                reply.status, reply.may_retry = response.status_code, "retry-after" in response.headers
                async for line in response.aiter_lines():
                    reply.take(line)
        except httpx.HTTPError as error:
            reply.broken = f"{type(error).__name__}: {error}"
        elapsed_s = time.monotonic() - began_s
        if elapsed_s > SLOW_S:
            logger.info(
                "slow: %.1f s, status %d, %d tokens %s", elapsed_s, reply.status, len(reply.tokens), reply.timings
            )
        self.tally.add(reply, question, elapsed_s)
