"""Lets through to the gRPC API who carries an API key, before a message is read, and bounds what a key has open.

A message must come in time: a call without one would hold its place for ever. It counts as a body, from before it is
decoded until its call has ended. Health checks and reflection, which are open to everybody and say little, and calls
that are refused have the few places of strangers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from diptych.common.errors import DeadlineExceeded, DiptychError, InvalidRequest, Overloaded, Unavailable
from diptych.common.net.raw_calls import Decode, Handler, Messages, run_raw
from diptych.common.trust.gatekeeper import Continuation, as_stranger
from diptych.common.trust.strangers import Strangers
from diptych.router.admission.body_budget import BodyBudget, HeldBody
from diptych.router.errors import RateLimited
from diptych.router.grpc.message_extent import Extent, check_extent, extent_of, shape_of
from diptych.router.keys.caller import ANYBODY, Callers

OPEN_SERVICES: Final = ("/grpc.health.", "/grpc.reflection.")
NUM_STRANGERS: Final = 1024  # at once; clients with health checks keep a call open
MAX_CALLS_OF_A_KEY: Final = 4096  # at once, those that wait in line too
MAX_STRANGE_BYTES: Final = 2**12  # of a message of somebody without a key: the name of a service, or of a file
MAX_ARRIVING: Final = 32  # messages of a key at once: what has come of them is held in memory
SMALL_BYTES: Final = 2**14  # have too little of anything to count it
QUICK_BYTES: Final = 2**18  # are decoded in less than a millisecond,
QUICK: Final = Extent(2**9, 2**9)  # and counted likewise, where they hold no more than that


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Stands before every method. `callers` is None where the API is open: then all are one."""

    def __init__(self, callers: Callers | None, budget: BodyBudget, reader: MessageReader, *, stall_s: float) -> None:
        self._callers = callers
        self._budget = budget
        self._reader = reader
        self._stall_s = stall_s  # that a message may take to come
        self._strangers = Strangers(NUM_STRANGERS)
        self._num_open: Counter[str] = Counter()  # by the key's name
        self._arriving: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_ARRIVING))

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # no such method: gRPC says so
        if handler_call_details.method.startswith(OPEN_SERVICES):
            return as_stranger(self._strangers, partial(_answer_stranger, handler), handler.response_serializer)
        try:
            name = self._name(handler_call_details)
        except DiptychError as error:
            return as_stranger(self._strangers, partial(_refuse, error))
        answer = partial(self._answer, handler, handler_call_details.method, name)
        return grpc.stream_stream_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    def _name(self, details: grpc.HandlerCallDetails) -> str:
        """Return whose key the call carries. Raises `Unauthenticated`."""
        if self._callers is None:
            return ANYBODY.name
        authorization = dict(details.invocation_metadata).get("authorization")
        return self._callers.identify(str(authorization) if authorization else None).name

    async def _answer(self, handler: Handler, method: str, name: str, messages: Messages, context: Any) -> None:
        held = self._budget.hold(name)
        try:
            with self._place(name):
                arrived = self._arrived(name, messages, held)
                await run_raw(handler, arrived, context, partial(self._reader.read, method))
        except DiptychError as error:
            await abort(context, error)
        finally:
            held.release()

    @contextmanager
    def _place(self, name: str) -> Generator[None, None, None]:
        if self._num_open[name] >= MAX_CALLS_OF_A_KEY:
            raise RateLimited(f"{MAX_CALLS_OF_A_KEY} calls of this key are open already; try again in 1 s")
        self._num_open[name] += 1
        try:
            yield
        finally:
            self._num_open[name] -= 1

    async def _arrived(self, name: str, messages: Messages, held: HeldBody) -> AsyncIterator[bytes]:
        """Yield the message of a call: all methods here take one. Raises `Overloaded` if there is no memory for it."""
        try:
            async with asyncio.timeout(self._stall_s), self._arriving[name]:
                message = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no message came for {self._stall_s:g} s") from None
        if message is not None:
            held.grow_to(len(message))
            yield message


async def _answer_stranger(handler: Handler, messages: Messages, context: Any) -> None:
    try:
        await run_raw(handler, messages, context, _read_short)
    except DiptychError as error:
        await abort(context, error)


async def _read_short(decode: Decode, message: bytes) -> Any:
    if len(message) > MAX_STRANGE_BYTES:
        raise InvalidRequest(f"a message of this method has at most {MAX_STRANGE_BYTES} bytes")
    return decode(message)


async def _refuse(error: DiptychError, _: object, context: Any) -> None:
    await abort(context, error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DiptychError) -> None:
    """End the call with the error's status. Raises."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded | Unavailable):
        metadata = (("retry-after", str(error.retry_after_s)),)
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), metadata)


class MessageReader:
    """Reads the requests of one service: counts what is in them, and decodes large ones in a thread.

    One thread, as those that make Python's objects wait for one another, and each holds all that it makes.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._shapes = {f"/{service.full_name}/{each.name}": shape_of(each.input_type) for each in service.methods}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="message")

    async def read(self, method: str, decode: Callable[[bytes], Any], message: bytes) -> Any:
        """Return what `decode` makes of a message. Raises `InvalidRequest`, and what `decode` does."""
        if len(message) <= SMALL_BYTES:
            return decode(message)
        shape = self._shapes[method]
        if len(message) <= QUICK_BYTES and extent_of(message, shape, QUICK).is_within(QUICK):
            return decode(message)

        def count_and_decode() -> Any:
            check_extent(message, shape)
            return decode(message)

        return await asyncio.get_running_loop().run_in_executor(self._thread, count_and_decode)
