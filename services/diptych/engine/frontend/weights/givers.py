"""Finds workers that may give a starting one its weights, and names them to its scheduler, which waits for that.

Who they are is known once membership lists ourselves: then it lists all, and their keys are told to us.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from diptych.common.members.record import State
from diptych.common.net.reachable import host_of
from diptych.common.trust.instance_secret import InstanceSecret
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.engine_pb2 import SchedulerCommands, WeightGiver, WeightGivers

MOST: Final = 3  # that are asked, one after the other
LISTED_S: Final = 3.0  # until membership lists us; without it weights are read from disk
TOLD_S: Final = 1.0  # from then on, until their keys are told


class Starting(Protocol):
    """A scheduler that waits."""

    async def send_first(self, commands: SchedulerCommands) -> None: ...


class Membership(Protocol):
    """Who is alive."""

    def instances(self) -> Mapping[int, Instance]: ...

    def add_listener(self, listener: Callable[[], None]) -> object: ...


async def name_givers(scheduler: Starting, membership: Membership, ours: InstanceSecret, weights_id: str) -> None:
    """Name up to `MOST` workers that have these weights; none, if there are none, or membership is away."""
    news = asyncio.Event()
    membership.add_listener(news.set)
    await _until(news, LISTED_S, lambda: ours.instance_id in membership.instances())
    others = membership.instances().values()
    await _until(news, TOLD_S, lambda: bool(givers(others, weights_id)) or not alike(others, weights_id))
    found = givers(others, weights_id)
    named = random.sample(found, min(MOST, len(found)))
    await scheduler.send_first(SchedulerCommands(weight_givers=WeightGivers(givers=named)))


def alike(instances: Iterable[Instance], weights_id: str) -> list[Instance]:
    """Return who serves these weights, and does not leave."""
    return [each for each in instances if each.terms.weights == weights_id and State(each.state) is State.READY]


def givers(instances: Iterable[Instance], weights_id: str) -> list[WeightGiver]:
    """Return whose door and key we know of those."""
    doors = [(host_of(each.address), each.transfer.weights_door) for each in alike(instances, weights_id)]
    return [WeightGiver(host=host, door=door) for host, door in doors if host and door.key]


async def _until(news: asyncio.Event, seconds: float, is_so: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not is_so():
                news.clear()
                await news.wait()
