"""What the log says of a bootstrap that is away."""

from __future__ import annotations

import asyncio
import itertools
import logging

import grpc
import pytest
from guarded_server import INSTANCE, cancel, run

from diptych.common.members import membership_client
from diptych.common.members.membership_client import MembershipWatcher, Registration
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.bootstrap_pb2_grpc import BootstrapServicer, add_BootstrapServicer_to_server

LOGGER = membership_client.__name__


class Refusing(BootstrapServicer):
    """Has one reason and the other in turn; knows when it has told each three times."""

    def __init__(self, *reasons: str) -> None:
        self._left = itertools.chain(reasons * 3, itertools.repeat(reasons[0]))
        self._number = len(reasons) * 3
        self.is_through = asyncio.Event()

    async def Watch(self, request: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        if not self._number:
            self.is_through.set()
        self._number -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, next(self._left))


class Refused:
    """A stream that is refused before the first message is written: only reading tells why."""

    def __init__(self, channel: object) -> None:
        pass

    def Register(self, metadata: object) -> Refused:
        return self

    async def write(self, message: object) -> None:
        raise asyncio.InvalidStateError("RPC already finished")

    async def read(self) -> None:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, none, none, "wrong token", "")


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    words = [record.getMessage() for record in caplog.records if ": away (" in record.getMessage()]
    return [each.partition(": away (")[2].partition(")")[0] for each in words]


def test_a_registration_that_is_refused_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_client, "BootstrapStub", Refused)
    is_told = asyncio.Event()

    async def test() -> None:
        described = asyncio.ensure_future(Registration(["127.0.0.1:1"], INSECURE, describe).run())
        await is_told.wait()
        await cancel([described])

    def describe() -> Instance:
        """For the second time when the first refusal has been logged."""
        if caplog.records:
            is_told.set()
        return INSTANCE

    with caplog.at_level(logging.WARNING, LOGGER):
        run(test)
    assert reasons(caplog) == ["wrong token"]


def test_each_reason_for_which_bootstrap_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server, refusing = new_server(INSECURE, Refusals()), Refusing("it starts", "wrong token")
        add_BootstrapServicer_to_server(refusing, server)
        port = listen(server, "127.0.0.1", 0, INSECURE)
        await server.start()
        watcher = asyncio.ensure_future(MembershipWatcher([f"127.0.0.1:{port}"], INSECURE).run())
        await refusing.is_through.wait()
        await cancel([watcher])
        await server.stop(grace=None)

    with caplog.at_level(logging.WARNING, LOGGER):
        run(test)
    assert reasons(caplog) == ["it starts", "wrong token"]
