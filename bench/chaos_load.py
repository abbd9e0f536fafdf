"""Greedy requests with known answers, and what became of each of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

CLIENT_TIMEOUT_S: Final = 30.0  # a request that takes longer hangs
RETRY_STATUSES: Final = (429, 503)  # which must say when to try again


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what one engine alone answers to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


class Unanswered(Exception):
    """The exchange ended without an answer and without an error."""


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
        began_s, tally = time.monotonic(), self.tally
        body = {"model": "", "prompt": list(question.prompt), "max_tokens": len(question.answer)}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": self._rng.random() < 0.7}
        try:
            await self._exchange(client, body, question)
        except (httpx.HTTPError, Unanswered) as error:
            tally.unanswered.append(f"{type(error).__name__}: {error}")
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began_s)

    async def _exchange(self, client: httpx.AsyncClient, body: dict[str, Any], question: Question) -> None:
        async with client.stream("POST", self._url, json=body, headers={"x-diptych-timings": "1"}) as response:
            if response.status_code != 200:
                await self._take_refusal(response)
            elif body["stream"]:
                await self._take_stream(response, question)
            else:
                answer = json.loads(await response.aread())
                self._check(answer["choices"][0]["token_ids"], answer["diptych"], question)

    async def _take_refusal(self, response: httpx.Response) -> None:
        words = (await response.aread()).decode()
        if response.status_code in RETRY_STATUSES and "retry-after" not in response.headers:
            raise Unanswered(f"status {response.status_code} without Retry-After: {words}")
        if "error" not in json.loads(words):
            raise Unanswered(f"status {response.status_code} without an error: {words}")
        self.tally.failed[response.status_code] += 1

    async def _take_stream(self, response: httpx.Response, question: Question) -> None:
        tokens: list[int] = []
        timings: dict[str, Any] = {}
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                self._check(tokens, timings, question)
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.tally.failed[200] += 1
                self._check_beginning(tokens, question)
                return
            tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            timings = event.get("diptych") or timings
        raise Unanswered(f"a stream ended after {len(tokens)} tokens without a word")

    def _check(self, tokens: Sequence[int], timings: dict[str, Any], question: Question) -> None:
        if list(tokens) != list(question.answer):
            self.tally.wrong.append(f"{len(tokens)} tokens {tokens}, not {question.answer}; {timings}")
            return
        self.tally.answered += 1
        self.tally.pages_moved += timings["pages_moved"]
        self.tally.digests_differ += timings["prefill_kv_digest"] != timings["decode_kv_digest"]

    def _check_beginning(self, tokens: Sequence[int], question: Question) -> None:
        """What was given out before an error must be right too."""
        if list(tokens) != list(question.answer[: len(tokens)]):
            self.tally.wrong.append(f"before an error: {tokens}, not {question.answer}")
