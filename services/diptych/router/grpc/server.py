"""Runs the gRPC API: Inference, health checks and reflection, behind a gate. The moment to stop is the caller's.

The gate lets through who carries an API key, before a message is read, and bounds what a key has open. A message must
come in time: a call without one would hold its place for ever. It counts as a body, from before it is decoded until its
call has ended. Health checks and reflection, which are open to everybody and say little, and calls that are refused
have the few places of strangers.

Reflection has the name that tools ask for first and the older one. The messages of both are the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from diptych.common.errors import DeadlineExceeded, DiptychError, InvalidRequest
from diptych.common.health.grpc_health import add_health
from diptych.common.net.descriptors import connections_within
from diptych.common.net.raw_calls import Decode, Handler, Messages, run_raw
from diptych.common.net.rpc import guarded_server, listen
from diptych.common.trust.gatekeeper import Continuation, Strangers, as_stranger
from diptych.common.trust.trust import INSECURE
from diptych.common.verdicts.probes import Probes
from diptych.router.admission.body_budget import BodyBudget, HeldBody
from diptych.router.errors import RateLimited
from diptych.router.extents.message_extent import Extent, check_extent, extent_of, shape_of
from diptych.router.grpc.convert import abort
from diptych.router.grpc.inference import INFERENCE, InferenceService
from diptych.router.keys.caller import ANYBODY, Callers
from diptych.v1 import inference_pb2_grpc

NEWER_NAME: Final = "grpc.reflection.v1.ServerReflection"
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
        try:
            await self._serve(handler, method, name, messages, context)
        except grpc.aio.AbortError as error:
            # gRPC keeps it with the call and raises it again: what it came through would keep the call, and the request
            error.__context__ = error.__traceback__ = None

    async def _serve(self, handler: Handler, method: str, name: str, messages: Messages, context: Any) -> None:
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


class GrpcServer:
    """The client-facing gRPC server. `start` it, `stop` it.

    After `max_connection_s` a client is told to open another connection for its next calls; running ones go on. Busy
    clients would else keep to a router that drains until it is gone.
    """

    def __init__(
        self,
        service: InferenceService,
        gate: CallGate,
        probes: Probes,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        max_connection_s: float,
        max_connections: int,
        shared: bool = False,
    ) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_connection_age_ms", round(max_connection_s * 1000)),  # the running calls' time has no bound
            ("grpc.max_allowed_incoming_connections", connections_within(max_connections)),
            ("grpc.so_reuseport", int(shared)),  # processes of one router share it
        )
        self._server = guarded_server(gate, options)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self._server)
        self._health = add_health(self._server, probes, (INFERENCE.full_name,))
        add_reflection(self._server, (INFERENCE.full_name, health.SERVICE_NAME))
        self.port = listen(self._server, host, port, INSECURE)  # clients are no members

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; end the running ones after `grace_s`."""
        self._health.close()
        await self._server.stop(grace_s)


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    names = (*services, reflection.SERVICE_NAME, NEWER_NAME)
    reflection.enable_server_reflection(names, server)
    info = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,  # type: ignore[attr-defined]
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(NEWER_NAME, {"ServerReflectionInfo": info})
    server.add_generic_rpc_handlers((handler,))
