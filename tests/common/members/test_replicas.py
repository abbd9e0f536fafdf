from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

import pytest

from diptych.common.errors import ConfigError
from diptych.common.members.replicas import Replicas, check_replicas, replicas_of, resolve

NAME = "dns:///boot:7000"
HUNG_S = 60.0  # that nothing takes on however busy a machine


class Names:
    """A name server that gives these answers, the last one for ever; `served` are the addresses that have a task."""

    def __init__(self, *answers: Sequence[str] | OSError) -> None:
        self._answers = [*answers]
        self.started: list[str] = []
        self.served: set[str] = set()
        self._news = asyncio.Event()

    def resolve(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("boot", 7000)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def serve(self, address: str) -> None:
        self.started.append(address)
        self.served.add(address)
        self._news.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.served.remove(address)
            self._news.set()

    async def until_served(self, *addresses: str) -> None:
        async with asyncio.timeout(HUNG_S):
            while self.served != set(addresses):
                self._news.clear()
                await self._news.wait()


def test_who_comes_is_served_who_goes_is_not_and_a_name_server_that_is_away_changes_nothing() -> None:
    async def test() -> None:
        names = Names(["old:1", "stays:2"], OSError("no answer"), ["stays:2", "new:3"])
        replicas = Replicas(["fixed:0", NAME], names.resolve, interval_s=0.001)
        task = asyncio.ensure_future(replicas.run(names.serve))
        await names.until_served("fixed:0", "stays:2", "new:3")
        assert replicas.known == ["fixed:0", "stays:2", "new:3"]
        assert names.started == ["fixed:0", "old:1", "stays:2", "new:3"]  # each once
        task.cancel()
        await names.until_served()

    asyncio.run(test())


def test_what_ends_one_replicas_task_ends_all() -> None:
    async def evicted(address: str) -> None:
        raise ConfigError(address)

    with pytest.raises(ConfigError, match="a:1"):
        asyncio.run(Replicas(["a:1"]).run(evicted))


def test_a_command_asks_all_that_there_are_now() -> None:
    assert replicas_of(["a:1", NAME, "a:1"], lambda host, port: [f"{host}-{n}:{port}" for n in "xy"]) == [
        "a:1",
        "boot-x:7000",
        "boot-y:7000",
    ]
    away = Names(OSError("gone"))
    with pytest.raises(ConfigError, match="can't resolve dns:///boot:7000: gone"):
        replicas_of([NAME], away.resolve)


def test_a_replica_that_is_done_with_keeps_nothing_busy_and_is_not_served_again() -> None:
    async def done(address: str) -> None:
        served.append(address)

    async def test() -> None:
        third = asyncio.Event()

        def resolve(host: str, port: int) -> Sequence[str]:
            asked_s.append(loop.time())
            if len(asked_s) == 3:
                loop.call_soon_threadsafe(third.set)
            return ["a:1"]

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(Replicas([NAME], resolve, interval_s=0.05).run(done))
        async with asyncio.timeout(HUNG_S):
            await third.wait()
        task.cancel()

    served: list[str] = []
    asked_s: list[float] = []
    asyncio.run(test())
    assert served == ["a:1"]
    assert asked_s[2] - asked_s[0] > 0.05  # two pauses lie between


def test_what_fails_while_a_name_is_resolved_is_raised() -> None:
    ended = threading.Event()

    async def fails(address: str) -> None:
        try:
            raise ConfigError(address)
        finally:
            ended.set()

    def resolve(host: str, port: int) -> Sequence[str]:
        if started:
            assert ended.wait(HUNG_S)
        started.append(host)
        return ["a:1"]

    started: list[str] = []
    with pytest.raises(ConfigError, match="a:1"):
        asyncio.run(asyncio.wait_for(Replicas([NAME], resolve, interval_s=0.0).run(fails), HUNG_S))


def test_an_address_may_stand_for_a_name() -> None:
    assert replicas_of(["dns:///[::1]:7000"]) == ["[::1]:7000"]


LONG = f"dns:///{'a' * 64}:7000"


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("dns:///boot",),
        ("dns:///:7000",),
        ("a:1", "dns:///boot:x"),
        ("dns:///a..b:7000",),
        (LONG,),
        ("dns:///a:70000",),
        ("boot",),
        (":7000",),
        ("a:1", "boot:70000"),
        ("::1",),
        ("fd00::5:7000",),  # gRPC would ask port 443 of the address fd00::5:7000
        ("[::1]",),
    ],
)
def test_addresses_that_can_not_be_are_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--bootstrap"):
        check_replicas(given)


@pytest.mark.parametrize(
    "given", ["[::1]:7000", "[fe80::1%eth0]:7000", "boot.ns.svc:7000", "ipv4:10.0.0.1:7000", "ipv6:[::1]:7000"]
)
def test_addresses_with_a_port_are_taken(given: str) -> None:
    check_replicas([given])


def test_addresses_behind_a_name_are_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 7000, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.1", 7000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert resolve("boot", 7000) == ["[fd00::1]:7000"]
