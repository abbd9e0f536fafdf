"""What a router does about members that come and go while it comes and goes itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from diptych.common.members.roles import Role
from diptych.common.trust.trust import INSECURE
from diptych.router.metrics import RouterMetrics
from diptych.router.workers.fleet import Fleet
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_STARTING, Instance

WORKER = Instance(instance_id=7, role=Role.PREFILL.wire, model_id="m", state=INSTANCE_STATE_STARTING)


class Members:
    """Implements `Membership`; who is not listed has said goodbye."""

    def __init__(self) -> None:
        self.listed = {WORKER.instance_id: WORKER}
        self._listeners: list[Callable[[], None]] = []

    def instances(self) -> Mapping[int, Instance]:
        return self.listed

    def has_ended(self, instance_id: int) -> bool:
        return True

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def lose_all(self) -> None:
        self.listed.clear()
        for listener in self._listeners:
            listener()


def test_a_worker_that_says_goodbye_to_a_router_that_has_closed_is_forgotten_at_once() -> None:
    async def test() -> None:
        members = Members()
        fleet = Fleet(members, INSECURE, "m", RouterMetrics(), 1)
        running = asyncio.ensure_future(fleet.run())
        await asyncio.sleep(0)
        assert [each.instance_id for each in fleet.sessions()] == [7]
        fleet.close("the router is stopping")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        members.lose_all()
        assert not fleet.sessions()

    asyncio.run(test())
