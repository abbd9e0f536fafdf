"""Two replicas in processes of their own, killed and restarted one after the other: nobody is missed meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from diptych.cli.requests.asking import members
from diptych.common.errors import ConfigError
from diptych.common.members.membership_client import MembershipWatcher, Registration
from diptych.common.net.ports import free_port
from diptych.common.trust.trust import TrustConfig
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_PREFILL, Instance

pytestmark = pytest.mark.integration

TIMEOUT_S = 200.0
TRUST = TrustConfig().trust()


class Replica:
    """A `diptych bootstrap` process at a port that stays."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--health-port", "0", "--heartbeat-s", "0.5", "--lease-s", "60"]
        self._process = subprocess.Popen([sys.executable, "-m", "diptych.cli", "bootstrap", *options])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def replicas() -> Iterator[tuple[Replica, Replica]]:
    both = Replica(), Replica()
    yield both
    for replica in both:
        replica.kill()


def worker(number: int) -> Instance:
    return Instance(instance_id=number, role=ROLE_PREFILL, address=f"host:{number}", state=INSTANCE_STATE_READY)


def listed(*replicas: Replica) -> set[int]:
    try:
        return {member.instance_id for member in members([replica.address for replica in replicas], TRUST)}
    except ConfigError:
        return set()


async def all_listed(replica: Replica) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await asyncio.to_thread(listed, replica) != {1, 2}:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.05)


def test_each_replica_may_die_and_come_back_without_anybody_being_missed(replicas: tuple[Replica, Replica]) -> None:
    addresses = [replica.address for replica in replicas]
    seen: list[set[int]] = []

    async def kill_and_restart_each() -> None:
        for replica in replicas:
            await all_listed(replica)
        for replica in replicas:
            replica.kill()
            assert await asyncio.to_thread(listed, *replicas) == {1, 2}  # the command line asks whoever answers
            replica.start()
            await all_listed(replica)

    async def test() -> None:
        watcher = MembershipWatcher(addresses, TRUST)
        watcher.add_listener(lambda: seen.append(set(watcher.instances())))
        registrations = [Registration(addresses, TRUST, partial(worker, number)) for number in (1, 2)]
        tasks = [asyncio.ensure_future(run) for run in (watcher.run(), *(each.run() for each in registrations))]
        await kill_and_restart_each()
        assert all(ids == {1, 2} for ids in seen[seen.index({1, 2}) :])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(test())
