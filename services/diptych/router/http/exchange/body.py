"""Reads a request's body, and no more of it, nor for longer, than is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import Message

from diptych.router.admission.body_budget import BodyBudget, HeldBody
from diptych.router.errors import BodyCutOff, BodyTooSlow, PayloadTooLarge, UnreadableEncoding
from diptych.router.extents.json_extent import is_quick

PLAIN: Final = b"identity"  # the content coding of what is not compressed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a client may send, and how slowly."""

    max_bytes: int
    stall_s: float  # without any of it
    whole_s: float  # for all of it, however steadily it comes


class BodyReader:
    """Reads bodies, and makes of them what they mean: of long ones in a thread, so that others are served meanwhile.

    One thread, as those that make Python's objects wait for one another, and each holds all that it makes.
    """

    def __init__(self, limits: BodyLimits, budget: BodyBudget) -> None:
        self._limits = limits
        self._budget = budget
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body")

    def hold(self, caller: str) -> HeldBody:
        """Return what the body of this caller takes of the memory for all bodies; `release` it when it is over."""
        return self._budget.hold(caller)

    async def read(self, request: Request, held: HeldBody, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of the body. Raises what `read_body` raises, and what `parse` does."""
        body = await read_body(request, self._limits, held)
        if is_quick(body):
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, parse, body)


async def read_body(request: Request, limits: BodyLimits, held: HeldBody) -> bytes:
    """Return the whole body. Raises `UnreadableEncoding`, `PayloadTooLarge` or `Overloaded` before it is in memory,
    `BodyTooSlow`, and `BodyCutOff`.
    """
    said = dict(reversed(request.scope["headers"]))  # the first of each name
    encoding = said.get(b"content-encoding", PLAIN)
    if encoding.lower() != PLAIN:
        words = f"the body is encoded as {encoding.decode('latin-1')!r}"
        raise UnreadableEncoding(f"{words}: send it as it is, without content-encoding")
    declared = said.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise _too_large(limits)
    clock = asyncio.get_running_loop().time
    end_s = clock() + limits.whole_s
    try:
        async with asyncio.timeout_at(min(clock() + limits.stall_s, end_s)) as patience:
            return await _read(request, limits, held, patience, end_s)
    except TimeoutError:
        raise _too_slow(limits, is_whole_time_over=clock() >= end_s) from None


async def _read(request: Request, limits: BodyLimits, held: HeldBody, patience: asyncio.Timeout, end_s: float) -> bytes:
    clock = asyncio.get_running_loop().time
    body = bytearray()
    while True:
        piece, more = _piece(await request.receive())
        if len(body) + len(piece) > limits.max_bytes:
            raise _too_large(limits)
        held.grow_to(len(body) + len(piece))
        if not more:
            return bytes(body + piece) if body else piece
        body += piece
        patience.reschedule(min(clock() + limits.stall_s, end_s))


def _piece(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise BodyCutOff("the client left before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limits: BodyLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is longer than {limits.max_bytes} bytes")


def _too_slow(limits: BodyLimits, *, is_whole_time_over: bool) -> BodyTooSlow:
    if is_whole_time_over:
        return BodyTooSlow(f"the body was not complete after {limits.whole_s:g} s: send the request again, faster")
    return BodyTooSlow(f"nothing of the body came for {limits.stall_s:g} s: send the request again")
