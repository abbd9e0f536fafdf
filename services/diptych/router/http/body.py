"""Reads a request's body, and no more of it, nor for longer, than is allowed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Message

from diptych.router.errors import BodyCutOff, BodyTooSlow, PayloadTooLarge


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a client may send, and how slowly."""

    max_bytes: int
    stall_s: float  # without any of it
    whole_s: float  # for all of it, however steadily it comes


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the whole body. Raises `PayloadTooLarge` before it is in memory, `BodyTooSlow`, and `BodyCutOff`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise _too_large(limits)
    clock = asyncio.get_running_loop().time
    end_s = clock() + limits.whole_s
    try:
        async with asyncio.timeout_at(end_s) as patience:
            return await _read(request, limits, patience, end_s)
    except TimeoutError:
        raise _too_slow(limits, is_whole_time_over=clock() >= end_s) from None


async def _read(request: Request, limits: BodyLimits, patience: asyncio.Timeout, end_s: float) -> bytes:
    clock = asyncio.get_running_loop().time
    chunks, num_bytes, more = [], 0, True
    while more:
        patience.reschedule(min(clock() + limits.stall_s, end_s))
        chunk, more = _chunk(await request.receive())
        num_bytes += len(chunk)
        if num_bytes > limits.max_bytes:
            raise _too_large(limits)
        chunks.append(chunk)
    return b"".join(chunks)


def _chunk(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise BodyCutOff("the client left before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is longer than {limits.max_bytes} bytes")


def _too_slow(limits: BodyLimits, *, is_whole_time_over: bool) -> BodyTooSlow:
    if is_whole_time_over:
        return BodyTooSlow(f"the body was not complete after {limits.whole_s:g} s: send the request again, faster")
    return BodyTooSlow(f"nothing of the body came for {limits.stall_s:g} s: send the request again")
