"""Runs a handler of any kind on the raw messages of a call: the code before it decides when they are read.

A message that is not a request of the method ends the call. gRPC alone would write a stack trace into the log for each.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Messages: TypeAlias = AsyncIterator[bytes]
Decode: TypeAlias = Callable[[bytes], Any]
Read: TypeAlias = Callable[[Decode, bytes], Awaitable[Any]]


async def read_at_once(decode: Decode, message: bytes) -> Any:
    return decode(message)


async def run_raw(handler: Handler, messages: Messages, context: Any, read: Read = read_at_once) -> None:
    """Answer the call by `handler`. `read` decodes a message."""
    decode = handler.request_deserializer or bytes
    try:
        if handler.request_streaming:
            await _answer(handler, _requests(decode, messages, read), context)
        elif (message := await anext(messages, None)) is not None:
            await _answer(handler, await read(decode, message), context)
        else:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call of this method has one message: none came")
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message is no request of this method")


async def _requests(decode: Decode, messages: Messages, read: Read) -> AsyncIterator[Any]:
    async for message in messages:
        yield await read(decode, message)


async def _answer(handler: Handler, request: Any, context: Any) -> None:
    behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    answering = next(filter(None, behaviours))(request, context)
    if inspect.isasyncgen(answering):
        async for response in answering:
            await context.write(response)
    elif handler.response_streaming:
        await answering  # writes by itself
    else:
        await context.write(await answering)
