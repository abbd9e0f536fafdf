"""What a router does whose address belongs to a newer one."""

from __future__ import annotations

import asyncio

from diptych.bootstrap.server import BootstrapService
from diptych.common.event_loop import Stop
from diptych.common.members.membership_client import Registration
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.router.main import _stay_registered
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_ROUTER, Instance

TIMEOUT_S = 200.0


def test_an_evicted_router_stops_as_if_it_was_told_to() -> None:
    async def test() -> None:
        service = BootstrapService(INSECURE, lease_s=600, heartbeat_s=0.05)
        server = new_server(INSECURE, Refusals())
        service.add_to(server)
        address = f"127.0.0.1:{listen(server, '127.0.0.1', 0, INSECURE)}"
        await server.start()
        old, new = (_registration(address, instance_id) for instance_id in (1, 2))
        stop = Stop()
        newer = asyncio.ensure_future(new.run())
        await asyncio.wait_for(_stay_registered(old, stop), TIMEOUT_S)
        assert stop.is_set()
        newer.cancel()
        await asyncio.wait([newer])
        await server.stop(grace=None)

    asyncio.run(test())


def _registration(address: str, instance_id: int) -> Registration:
    record = Instance(instance_id=instance_id, role=ROLE_ROUTER, address="host:1", state=INSTANCE_STATE_READY)
    return Registration([address], INSECURE, lambda: record)
