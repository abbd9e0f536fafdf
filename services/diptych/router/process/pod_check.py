"""Members as bootstrap lists them, without those whose pods Kubernetes does not list any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from diptych.common.errors import DiptychError
from diptych.common.members.pods import Pod, vanished
from diptych.router.workers.fleet import Membership
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0  # between two looks at pods


class Members(Membership, Protocol):
    """What bootstrap says."""

    def retained(self) -> Mapping[int, Instance]:
        """Those that no connected replica lists."""
        ...


class PodCheck:
    """A membership without those whose pods, as Kubernetes lists them, are gone. `run` must be running.

    All pods are asked for again and again, and none is watched: there is no event to lose. While the API can't be
    asked, what it said last is kept: an instance whose pod is gone never comes back.
    """

    def __init__(self, members: Members, list_pods: Callable[[], Mapping[str, Pod]]) -> None:
        """`list_pods` blocks, and raises `DiptychError` while the API can't be asked."""
        self._members = members
        self._list_pods = list_pods
        self._pods: Mapping[str, Pod] = {}
        self._seen: set[str] = set()
        self._is_away = False  # the API
        self._listeners: list[Callable[[], None]] = []

    def instances(self) -> Mapping[int, Instance]:
        listed = self._members.instances()
        gone = vanished(self._members.retained().values(), self._seen, self._pods)
        return {key: value for key, value in listed.items() if key not in gone} if gone else listed

    def has_ended(self, instance_id: int) -> bool:
        return self._members.has_ended(instance_id)

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._members.add_listener(listener)
        self._listeners.append(listener)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Take in all pods of now."""
        try:
            self._pods = await asyncio.to_thread(self._list_pods)
        except DiptychError as error:
            if not self._is_away:
                logger.warning("can't list pods (%s): going on with those of before", error)
            self._is_away = True
            return
        self._is_away = False
        members = {member.pod for member in self._members.instances().values()}
        self._seen = (self._seen & members) | self._pods.keys()  # who is no member needs no memory
        for listener in self._listeners:
            listener()
