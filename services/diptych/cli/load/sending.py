"""Sends a load to a server when each call is due, and notes how it was served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from diptych.cli.load.asked import Asked
from diptych.cli.load.client import Server, ServerError, events, fetch
from diptych.cli.load.served import Served

Api = Literal["completions", "chat"]
PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how."""

    server: Server
    model: str
    api: Api = "completions"
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every body


@dataclass(slots=True)
class _Heard:
    """What has come of a call so far."""

    began_s: float
    stamps_s: list[float] = field(default_factory=list)
    num_texts: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)

    def on_event(self, event: Mapping[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            self.stamps_s.append(time.perf_counter() - self.began_s)
            self.num_texts += 1


async def send_all(target: Target, load: Sequence[Asked], concurrency: int = 0) -> list[Served]:
    """Return how each call was served; `concurrency` 0: as many at once as are due."""
    places = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    ended = [asyncio.Event() for _ in load]
    began_s = time.perf_counter()

    async def send(number: int) -> Served:
        try:
            due_s = await _until_due(load, number, ended, began_s)
            return await _send(target, load[number], due_s, places, began_s)
        finally:
            ended[number].set()

    return await asyncio.gather(*(send(number) for number in range(len(load))))


async def served_model(server: Server) -> tuple[str, int]:
    """Return the first model of a server, and its context in tokens; 0: it does not say. Raises `ServerError`."""
    try:
        model = (await _listed(server))[0]
        return str(model["id"]), int(model.get("max_model_len") or 0)
    except (LookupError, TypeError, ValueError):
        raise ServerError("GET /v1/models names no model: give --model") from None


async def context_of(server: Server, model: str) -> int:
    """Return the context of a model in tokens; 0: the server does not say, or lists none, which it need not."""
    try:
        listed = await _listed(server)
        return next((int(each.get("max_model_len") or 0) for each in listed if each["id"] == model), 0)
    except (ServerError, LookupError, TypeError, ValueError, AttributeError):
        return 0


async def _listed(server: Server) -> Sequence[Any]:
    found: Sequence[Any] = (await fetch(server, "GET", "/v1/models"))["data"]
    return found


def body_of(target: Target, asked: Asked) -> Mapping[str, Any]:
    """Return what is sent for a call."""
    prompt: Mapping[str, Any] = (
        {"messages": [{"role": "user", "content": asked.prompt}]} if target.api == "chat" else {"prompt": asked.prompt}
    )
    return {
        "model": target.model,
        **prompt,
        "max_tokens": asked.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }


async def _until_due(load: Sequence[Asked], number: int, ended: Sequence[asyncio.Event], began_s: float) -> float:
    """Wait until a call may come; return when that was due."""
    asked = load[number]
    due_s = asked.due_s
    if asked.follows >= 0:
        await ended[asked.follows].wait()
        due_s = time.perf_counter() - began_s + asked.gap_s
    await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
    return due_s


async def _send(
    target: Target, asked: Asked, due_s: float, places: AbstractAsyncContextManager[Any], began_s: float
) -> Served:
    """A call that has to wait for a place is due when it has one."""
    is_free = isinstance(places, nullcontext) or not places.locked()  # type: ignore[attr-defined]
    async with places:
        heard, sent_s, error = _Heard(began_s), time.perf_counter() - began_s, ""
        try:
            await events(target.server, PATHS[target.api], body_of(target, asked), heard.on_event)
        except ServerError as failure:
            error = str(failure)
        ended_s = time.perf_counter() - began_s
    usage = heard.usage
    return Served(
        due_s=due_s if is_free else sent_s,
        sent_s=sent_s,
        stamps_s=tuple(heard.stamps_s),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or heard.num_texts),
        error=error or ("" if heard.stamps_s else "an answer without text"),
        ended_s=ended_s,
    )


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))
