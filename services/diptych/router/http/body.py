"""Reads a request's body, and no more of it than is allowed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message

from diptych.router.errors import BodyCutOff, PayloadTooLarge


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. Raises `PayloadTooLarge` before it is in memory, and `BodyCutOff`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, num_bytes, more = [], 0, True
    while more:
        message = await request.receive()
        chunk, more = _chunk(message)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _chunk(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise BodyCutOff("the client left before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is longer than {max_bytes} bytes")
